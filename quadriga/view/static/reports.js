// SPDX-License-Identifier: Apache-2.0
// Coverage, time and health of a run.
"use strict";

const MAX_TABLE_STEPS = 60;

async function coveragePage(main, query) {
  const [answer, metrics] = await Promise.all([ask("steps", { run: query.run }), ask("metrics", { run: query.run })]);
  const { steps, columns, reasons, problems } = answer.step;
  put(main, h("h2", {}, "Coverage: what became of each rollout"));
  put(main, indexNote(main, query.run, answer));
  const metricAt = (name, step) => {
    const place = metrics.steps.indexOf(step);
    return place < 0 || !metrics.columns[name] ? null : metrics.columns[name][place];
  };
  for (const text of coverageWarnings(steps, columns, metrics, problems)) put(main, note(text));
  const dropNames = Object.keys(metrics.columns).filter((name) => name.startsWith("async/dropped_") || ["filter_groups/num_equal", "filter_groups/num_surplus"].includes(name));
  const allSteps = [...new Set([...steps, ...metrics.steps.filter((step) => step > 0)])].sort((one, two) => one - two);
  const shownSteps = (query.all === "1" ? [...allSteps] : allSteps.slice(-MAX_TABLE_STEPS)).reverse();
  if (allSteps.length > MAX_TABLE_STEPS) put(main, h("div", { class: "bar" }, toggle(`all ${num(allSteps.length)} steps`, query.all === "1", () => update({ all: query.all === "1" ? "" : "1" }))));
  const head = ["step", "", "recorded", "graded", "grader errors", "truncated", "not trained", "tokens", "rejected tokens", ...dropNames];
  const rows = shownSteps.map((step) => {
    const place = steps.indexOf(step);
    const at = (name) => (place < 0 || !columns[name] ? null : columns[name][place]);
    const open = () => go("rollouts", { run: query.run, step });
    const count = at("rollouts");
    const untrained = at("not_computed") || 0;
    const title = place < 0 ? "" : Object.entries(reasons[place]).map(([reason, number]) => `${number}: ${reason}`).join("\n");
    return h("tr", { class: "click", tabindex: "0", onclick: open, onkeydown: (event) => event.key === "Enter" && open() },
      h("td", { class: "num" }, num(step)), h("td", {}, count ? shareBar(count, untrained, at("grader_errors") || 0) : h("span", { class: "soft" }, "no record")),
      ["rollouts", "graded", "grader_errors", "truncated"].map((name) => h("td", { class: "num" }, num(at(name)))),
      h("td", { class: "num", title }, num(at("not_computed"))), h("td", { class: "num" }, num(at("generated_tokens"))), h("td", { class: "num" }, num(at("rejected_tokens"))),
      dropNames.map((name) => h("td", { class: "num" }, num(metricAt(name, step)))));
  });
  const totals = reasons.flatMap((entry) => Object.entries(entry)).reduce((sums, [reason, count]) => sums.set(reason, (sums.get(reason) || 0) + count), new Map());
  put(
    main,
    h("div", { class: "bar keys" }, [["trained", "--good"], ["not trained", "--warn"], ["grader error", "--bad"]].map(([text, color]) => h("span", {}, h("span", { class: "swatch", style: { background: `var(${color})` } }), text))),
    h("div", { class: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, head.map((text, place) => h("th", { class: place !== 1 ? "num" : "" }, text)))), h("tbody", {}, rows))));
  if (totals.size) put(main, h("h3", {}, "Why rollouts were not trained"), h("ul", {}, [...totals].map(([reason, count]) => h("li", {}, `${num(count)}: ${reason}`))));
}

function coverageWarnings(steps, columns, metrics, problems) {
  const warnings = problems.filter(Boolean).map((text) => text);
  const recorded = new Set(steps);
  const missing = metrics.steps.filter((step) => step > 0 && !recorded.has(step));
  if (missing.length) warnings.push(`${num(missing.length)} steps have metrics but no record of rollouts (the first is ${missing[0]}): trainer.rollout_record_gib thinned them, or the record was off.`);
  const known = new Set(metrics.steps);
  const unknown = metrics.steps.length ? steps.filter((step) => !known.has(step)) : [];
  if (unknown.length) warnings.push(`${num(unknown.length)} recorded steps have no metrics (the first is ${unknown[0]}): the run ended within them, or metrics.jsonl is of another run.`);
  const sum = (name) => (columns[name] || []).reduce((total, value) => total + (value || 0), 0);
  const unscored = sum("rollouts") - sum("graded");
  if (unscored > 0) warnings.push(`${num(unscored)} recorded rollouts have no score: they are neither learned from nor part of a baseline.`);
  // Both sides count the same tokens, unless rows were left out on the way.
  const place = (step) => metrics.steps.indexOf(step);
  const generated = metrics.columns["rollout/num_response_tokens"];
  if (generated && columns.generated_tokens) {
    const fewer = steps.filter((step, number) => isNumber(columns.generated_tokens[number]) && place(step) >= 0 && isNumber(generated[place(step)]) && columns.generated_tokens[number] < generated[place(step)]);
    if (fewer.length) warnings.push(`In ${num(fewer.length)} steps fewer tokens were trained on than generated (the first is ${fewer[0]}): dynamic sampling filtered groups, or an asynchronous run dropped them.`);
  }
  return warnings;
}

function shareBar(total, untrained, errors) {
  const width = 140;
  const bar = svg("svg", { width, height: 12, role: "img", "aria-label": `${total - untrained} of ${total} trained` });
  const parts = [[total - untrained, "--good"], [untrained, "--warn"]];
  let x = 0;
  for (const [count, color] of parts) {
    const size = (width * count) / total;
    bar.append(svg("rect", { x, y: 0, width: size, height: 12, fill: css(color) }));
    x += size;
  }
  if (errors) bar.append(svg("rect", { x: 0, y: 9, width: (width * errors) / total, height: 3, fill: css("--bad") }));
  return bar;
}

// Lanes of a step: role, phases in the order in which the driver runs them.
const LANES = [
  ["rollout", ["gen", "gen_max", "generate_sequences", "tools"]],
  ["graders", ["reward"]],
  ["reward model", ["rm"]],
  ["reference", ["ref", "teacher"]],
  ["critic", ["values", "update_critic"]],
  ["actor", ["old_log_prob", "update_actor", "publish_weights"]],
  ["driver", ["data", "adv", "testing", "save_checkpoint"]],
];
const SEQUENCE = ["data", "gen", "gen_max", "prepare", "adv", "update_critic", "update_actor", "publish_weights", "testing", "save_checkpoint"];
const OVERLAPPING = ["old_log_prob", "ref", "teacher", "values", "rm", "reward"];
const SLOW_RATIO = 1.2;
const PARTS_OF_GENERATION = ["generate_sequences", "tools"];

// Begin and length of each phase of a step, as far as its metrics tell.
function phaseTimes(at) {
  const times = {};
  let now = 0;
  for (const phase of SEQUENCE) {
    const seconds = at(phase);
    if (!isNumber(seconds)) continue;
    times[phase] = [now, seconds];
    const inner = phase === "prepare" ? OVERLAPPING : phase === "gen" ? PARTS_OF_GENERATION : [];
    for (const part of inner) if (isNumber(at(part))) times[part] = [now, at(part)];
    now += seconds;
  }
  return [times, Math.max(now, at("step") || 0)];
}

async function timePage(main, query) {
  const metrics = await ask("metrics", { run: query.run });
  const timed = metrics.steps.filter((step, place) => isNumber((metrics.columns["timing_s/step"] || [])[place]));
  put(main, h("h2", {}, "Time"));
  if (!timed.length) {
    put(main, note("The metrics have no times yet (timing_s/step)."));
    return;
  }
  const step = timed.includes(Number(query.step)) ? Number(query.step) : timed[timed.length - 1];
  const place = metrics.steps.indexOf(step);
  const at = (phase) => (metrics.columns[`timing_s/${phase}`] || [])[place];
  const [times, total] = phaseTimes(at);
  put(main, h("div", { class: "bar" }, stepBar({ ...query, step }, timed, ["step"]), h("span", {}, `took ${duration(total)}`)));
  const color = (phase) => palette[[...SEQUENCE, ...OVERLAPPING, ...PARTS_OF_GENERATION].indexOf(phase) % palette.length];
  put(main, h("h3", {}, "A lane for each role"));
  for (const [role, phases] of LANES) {
    const blocks = phases.filter((phase) => times[phase]).map((phase) => [times[phase][0], times[phase][1], phase, color(phase)]);
    if (blocks.length) put(main, lane(role, blocks, total, blocks.filter(([, , phase]) => !PARTS_OF_GENERATION.includes(phase)).reduce((sum, block) => sum + block[1], 0)));
  }
  const imbalance = (metrics.columns["perf/imbalance/actor"] || [])[place];
  put(main, h("p", { class: "soft" }, "Phases that overlap (old log-probs, reference, values, grading) are drawn from the begin of their phase; times of several ranks are those of the slowest.",
    isNumber(imbalance) ? ` In the update the rank with the most work had ${num(imbalance)} times the mean.` : ""));
  await rankLanes(main, query.run, step, total);
  put(main, h("h3", {}, "Share of each phase over all steps"), sharesTable(metrics, timed, color), h("h3", {}, "Step times and memory"));
  const cards = h("div", { class: "grid" });
  const loaded = [await loadCurves(query.run)];
  for (const name of ["timing_s/step", "perf/throughput", "perf/memory_resident_gib", "perf/memory_peak_gib", "perf/imbalance/actor", "perf/mfu/actor"]) {
    if (loaded[0].curves.has(name)) cards.append(curveCard(name, loaded, "step", 0, false));
  }
  put(main, cards, h("h3", {}, `Lives of the rollouts of step ${step}`));
  await rolloutLanes(main, query.run, step);
}

function lane(label, blocks, total, seconds) {
  const picture = svg("svg", { viewBox: "0 0 1000 18", preserveAspectRatio: "none", role: "img", "aria-label": `${label}: ${duration(seconds)}` });
  for (const [begin, length, text, color, opacity = 0.85] of blocks) {
    const block = svg("rect", { x: (1000 * begin) / total, y: 1, width: Math.max(1, (1000 * length) / total), height: 16, fill: color, opacity });
    block.addEventListener("mousemove", (event) => showTip(`${text}\n${duration(length)}`, event.clientX, event.clientY));
    block.addEventListener("mouseleave", hideTip);
    picture.append(block);
  }
  return h("div", { class: "lane" }, h("span", { title: label }, label), picture, h("span", { class: "num" }, duration(seconds)));
}

// Lanes of the ranks of several processes. A rank that computes much longer than the others of its role is marked.
async function rankLanes(main, run, step, stepSeconds) {
  const { lanes, note: text } = await ask("ranks", { run, step });
  if (!lanes.length) return;
  const methods = [...new Set(lanes.flatMap((entry) => entry.calls.map(([method]) => method)))].sort();
  const color = (method) => palette[methods.indexOf(method) % palette.length];
  const total = Math.max(stepSeconds, ...lanes.flatMap((entry) => entry.calls.map(([, begin, seconds]) => begin + seconds)));
  put(main, h("h3", {}, "A lane for each rank"),
    h("p", { class: "soft" }, "Calls of each process. The pale end of a call is the time in which the rank waited for others, wherever in the call that was; it is measured on CPUs. Seconds are those of computing. ", text),
    h("div", { class: "bar keys" }, methods.map((method) => h("span", {}, h("span", { class: "swatch", style: { background: color(method) } }), method))));
  for (const entry of lanes) {
    const blocks = [];
    for (const [method, begin, seconds, waited] of entry.calls) {
      const start = Math.max(0, begin);
      const end = begin + seconds;
      const middle = Math.max(start, end - waited);
      if (middle > start) blocks.push([start, middle - start, `${method}: computes`, color(method)]);
      if (end > middle) blocks.push([middle, end - middle, `${method}: waits for other ranks`, color(method), 0.25]);
    }
    const ratio = ratioToOthers(entry, lanes);
    const label = `${entry.role} ${entry.rank}${ratio > SLOW_RATIO ? ` · ${ratio.toFixed(1)}×` : ""}`;
    put(main, lane(label, blocks, total, entry.computed || 0));
  }
}

function ratioToOthers(entry, lanes) {
  const others = lanes.filter((lane) => lane !== entry && lane.role === entry.role && isNumber(lane.computed)).map((lane) => lane.computed).sort((one, two) => one - two);
  if (!others.length || !isNumber(entry.computed)) return 1;
  const half = others.length / 2;
  const median = (others[Math.floor(half - 0.5)] + others[Math.floor(half)]) / 2;
  return median > 0 ? entry.computed / median : 1;
}

function sharesTable(metrics, timed, color) {
  const sum = (name) => (metrics.columns[name] || []).reduce((total, value) => total + (value || 0), 0);
  const total = sum("timing_s/step");
  const rows = SEQUENCE.map((phase) => [phase, sum(`timing_s/${phase}`)]).filter(([, seconds]) => seconds > 0);
  rows.sort((one, two) => two[1] - one[1]);
  return h("div", {}, rows.map(([phase, seconds]) => lane(`${phase}  ${percent(seconds / total)}`, [[0, seconds, phase, color(phase)]], total, seconds)));
}

async function rolloutLanes(main, run, step) {
  const { lanes, note: text } = await ask("lanes", { run, step });
  if (text) put(main, h("p", { class: "soft" }, text));
  if (!lanes.length) return;
  if (lanes[0].life) {
    lifeLanes(main, lanes);
    return;
  }
  const total = Math.max(...lanes.map((entry) => entry.turns.reduce((sum, turn) => sum + turn.seconds, 0)), 1e-9);
  const colors = { assistant: palette[0], tool: palette[1], user: palette[2] };
  put(main, h("p", { class: "soft" }, "Turns one after the other; waiting between them is not recorded. Processes are those of the rollout's ranks."),
    h("div", { class: "bar keys" }, Object.entries(colors).map(([role, color]) => h("span", {}, h("span", { class: "swatch", style: { background: color } }), role))));
  lanes.sort((one, two) => (one.process < two.process ? -1 : one.process > two.process ? 1 : 0));
  let process = null;
  for (const entry of lanes) {
    if (entry.process !== process) put(main, h("h3", {}, `process ${entry.process}`));
    process = entry.process;
    let now = 0;
    const blocks = entry.turns.map((turn) => {
      const block = [now, turn.seconds, `${turn.role}${turn.tools.length ? `: ${turn.tools.join(", ")}` : ""}`, colors[turn.role] || palette[4]];
      now += turn.seconds;
      return block;
    });
    put(main, lane(`${entry.uid} · ${num(entry.score)}`, blocks, total, now));
  }
}

// Lives of single-turn responses: queued, generated, graded. The color is that of the newest weights that wrote them.
function lifeLanes(main, lanes) {
  const total = Math.max(...lanes.flatMap((entry) => entry.life.filter(isNumber)), 1e-9);
  const newest = (entry) => entry.versions[entry.versions.length - 1];
  const versions = [...new Set(lanes.map(newest).filter(isNumber))].sort((one, two) => one - two);
  const color = (version) => palette[(isNumber(version) ? version : 0) % palette.length];
  put(main, h("p", { class: "soft" }, "Pale: queued. Colored: generated. Gray: until the grade arrived, which is not known for responses that are graded as soon as they end. Seconds since the first of them was queued."),
    h("div", { class: "bar keys" }, versions.map((version) => h("span", {}, h("span", { class: "swatch", style: { background: color(version) } }), `weights ${num(version)}`))));
  for (const entry of lanes) {
    const [queued, admitted, generated, graded] = entry.life;
    const begin = isNumber(admitted) ? admitted : queued;
    const weights = [...new Set(entry.versions)].map((version) => num(version)).join(" to ");
    const blocks = [[begin, generated - begin, `generated${weights ? ` with weights ${weights}` : ""}`, color(newest(entry))]];
    if (begin > queued) blocks.push([queued, begin - queued, "queued", color(newest(entry)), 0.25]);
    if (isNumber(graded) && graded > generated) blocks.push([generated, graded - generated, "waits for its grade", css("--soft"), 0.5]);
    put(main, lane(`${entry.uid} · ${num(entry.score)}`, blocks, total, generated - queued));
  }
}

async function healthPage(main, query) {
  const { findings, problems, indexed, total } = await ask("health", { run: query.run });
  put(main, h("h2", {}, "Health"));
  for (const problem of problems) put(main, note(problem));
  put(main, indexNote(main, query.run, { indexed, total }));
  const words = { good: "good", warning: "look at this", bad: "wrong", unknown: "not known" };
  put(main, h("div", { class: "grid" }, findings.map((finding) =>
    h("section", { class: `card ${finding.state}` }, h("h3", {}, finding.title, h("span", { class: `state ${finding.state}` }, words[finding.state])),
      h("p", {}, finding.sentence),
      ["bad", "warning"].includes(finding.state) ? h("p", {}, h("b", {}, "What people do: "), finding.advice) : "",
      finding.state === "unknown" ? "" : h("p", { class: "soft" }, h("a", { href: address("curves", { run: query.run, metrics: finding.metric }) }, finding.metric), " · ",
        h("a", { href: address("rollouts", { run: query.run, step: finding.step }) }, `rollouts of step ${finding.step}`))))));
}
