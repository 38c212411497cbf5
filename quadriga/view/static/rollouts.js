// SPDX-License-Identifier: Apache-2.0
// Rollouts of a step with filters, and the list of prompts.
"use strict";

const ROW_HEIGHT = 46;
const NUM_BINS = 24;
const MAX_STEP_LINKS = 40;
const ROW_COLUMNS = [
  // key, title, width, kind
  ["place", "#", "3.2rem", "num"],
  ["score", "score", "4.2rem", "num"],
  ["reward", "reward", "4.2rem", "num"],
  ["advantage", "adv.", "4.2rem", "num"],
  ["length", "length", "3.8rem", "num"],
  ["prompt_text", "prompt", "minmax(9rem, 2fr)", "text"],
  ["truth", "truth", "minmax(3rem, .7fr)", "text"],
  ["text", "response", "minmax(10rem, 3fr)", "text"],
  ["flags", "", "minmax(6rem, 1fr)", "flags"],
];
const FLAGS = [
  // key, label, whether a row has it, the color
  ["error", "grader error", (row) => Boolean(row.reward_error), "bad"],
  ["truncated", "truncated", (row) => row.truncated, ""],
  ["stale", "stale", (row) => row.staleness > 0, ""],
  ["untrained", "not trained", (row) => Boolean(row.not_computed) || row.trained === 0, ""],
  ["unscored", "no score", (row) => row.score === null, "bad"],
];
let rowCache = { key: "", rows: [] };

// The row that a click and the arrow keys choose among: those of the list as it is filtered.
let shownPlaces = [];

async function loadRows(run, kind, step) {
  const key = JSON.stringify([run, kind, step]);
  if (rowCache.key !== key) rowCache = { key, rows: (await ask("rollouts", { run, kind, step })).rows };
  return rowCache.rows;
}

function stepBar(query, steps, kinds) {
  const kind = query.kind || "step";
  const step = Number(query.step);
  const place = steps.indexOf(step);
  const open = (number) => () => {
    if (steps[number] !== undefined) update({ step: steps[number], place: "" }, false);
  };
  pageKeys["["] = open(place - 1);
  pageKeys["]"] = open(place + 1);
  const field = h("input", { type: "number", value: String(step), min: String(steps[0]), max: String(steps[steps.length - 1]), "aria-label": "step" });
  field.addEventListener("change", () => {
    // The nearest step that is recorded.
    const wanted = Number(field.value);
    const nearest = steps.reduce((best, entry) => (Math.abs(entry - wanted) < Math.abs(best - wanted) ? entry : best), steps[0]);
    update({ step: nearest, place: "" }, false);
  });
  return [
    kinds.length > 1 ? choice(kinds.map((entry) => [entry, entry === "step" ? "training" : "validation"]), kind, (value) => update({ kind: value, step: "", place: "", prompt: "" }, false), { "aria-label": "training or validation" }) : null,
    h("button", { onclick: open(place - 1), disabled: place <= 0, title: "key [" }, "‹"),
    h("label", {}, "step", field, `of ${num(steps[steps.length - 1])}`),
    h("button", { onclick: open(place + 1), disabled: place >= steps.length - 1, title: "key ]" }, "›"),
  ];
}

async function rolloutsPage(main, query) {
  const answer = await ask("steps", { run: query.run });
  const kinds = ["step", "validation"].filter((name) => answer[name].steps.length);
  if (!kinds.length) {
    const summary = await ask("summary", { run: query.run });
    put(main, h("h2", {}, "Rollouts"), summary.problems.map((text) => note(text)));
    return;
  }
  const kind = kinds.includes(query.kind) ? query.kind : kinds[0];
  const { steps } = answer[kind];
  if (embedded) {
    const has = (step) => JSON.stringify(["rollouts", { kind, run: query.run, step: String(step) }]) in embedded.answers;
    for (const step of [...steps]) if (!has(step)) steps.splice(steps.indexOf(step), 1);
  }
  let hasPromptSteps = false;
  if (query.prompt && kind === "step") {
    // Only the steps that have the prompt, if the list of prompts knows it.
    const { prompts } = await ask("prompts", { run: query.run });
    const entry = prompts.find((candidate) => candidate.prompt === query.prompt);
    const having = entry ? steps.filter((number) => entry.steps.includes(number)) : [];
    hasPromptSteps = having.length > 0;
    if (hasPromptSteps) steps.splice(0, steps.length, ...having);
  }
  let step = query.step ? Number(query.step) : steps[steps.length - 1];
  if (!steps.includes(step)) {
    const nearest = steps.reduce((best, entry) => (Math.abs(entry - step) < Math.abs(best - step) ? entry : best), steps[0]);
    put(main, note(`Step ${step} has ${hasPromptSteps ? "no rollouts of this prompt" : "no record"}; these are the rollouts of step ${nearest}.`));
    step = nearest;
  }
  const exact = { ...query, kind, step };
  if (hasPromptSteps) put(main, promptSteps(exact, steps));
  const bar = h("div", { class: "bar" }, stepBar(exact, steps, kinds));
  put(main, bar);
  const rows = await loadRows(query.run, kind, step);
  if (query.place !== undefined) {
    await rolloutView(main, exact, rows);
    return;
  }
  await rowList(main, bar, exact, rows);
}

// Links to the steps of a prompt.
function promptSteps(query, steps) {
  const links = steps.slice(-MAX_STEP_LINKS).map((step) => [" ", step === query.step ? h("b", {}, num(step)) : h("a", { href: address("rollouts", { ...query, step, place: "" }) }, num(step))]);
  const left = steps.length > MAX_STEP_LINKS ? `, of which the last ${MAX_STEP_LINKS} are` : "";
  return h("p", { class: "soft" }, `Steps with this prompt: ${num(steps.length)}${left}:`, links);
}

function passes(row, query, places) {
  const value = row[query.by || "score"];
  if ((query.low || query.high) && !isNumber(value)) return false;
  if (query.low && value < Number(query.low)) return false;
  if (query.high && value > Number(query.high)) return false;
  if (query.source && row.data_source !== query.source) return false;
  if (query.agent && row.agent !== query.agent) return false;
  if (query.prompt && row.prompt !== query.prompt) return false;
  if (query.longer && row.length < Number(query.longer)) return false;
  if (query.shorter && row.length > Number(query.shorter)) return false;
  if (query.flag && !FLAGS.find(([key]) => key === query.flag)[2](row)) return false;
  return places === null || places.has(row.place);
}

async function matchingPlaces(query, rows) {
  if (!query.text) return null;
  if (embedded) {
    const wanted = query.text.toLowerCase();
    return new Set(rows.filter((row) => `${row.prompt_text}\n${row.text}`.toLowerCase().includes(wanted)).map((row) => row.place));
  }
  const { run, kind, step, text } = query;
  return new Set((await ask("search", { run, kind, step, text })).places);
}

async function rowList(main, bar, query, rows) {
  const places = await matchingPlaces(query, rows);
  const distinct = (key) => [...new Set(rows.map((row) => row[key]).filter(Boolean))].sort();
  const sources = distinct("data_source");
  const agents = distinct("agent");
  const unflagged = rows.filter((row) => passes(row, { ...query, flag: "" }, places));
  const count = (test) => unflagged.filter(test).length;
  const field = (key, label) => {
    const input = h("input", { type: "number", value: query[key] || "", "aria-label": label });
    input.addEventListener("change", () => update({ [key]: input.value }));
    return input;
  };
  const search = h("input", { type: "search", value: query.text || "", placeholder: "search texts ( / )", "aria-label": "search text" });
  search.addEventListener("change", () => update({ text: search.value }));
  put(
    bar,
    sources.length > 1 ? choice([["", "all data sources"], ...sources.map((name) => [name, name])], query.source || "", (value) => update({ source: value })) : "",
    agents.length > 1 ? choice([["", "all agents"], ...agents.map((name) => [name, name])], query.agent || "", (value) => update({ agent: value })) : "",
    search,
    h("label", {}, "length", field("longer", "shortest"), "to", field("shorter", "longest")),
    FLAGS.filter(([key, , test]) => query.flag === key || count(test)).map(([key, label, test]) =>
      toggle(`${label} ${num(count(test))}`, query.flag === key, () => update({ flag: query.flag === key ? "" : key }))),
  );
  if (query.prompt) put(bar, toggle("one prompt ✕", true, () => update({ prompt: "" })));
  put(main, histogram(query, rows.filter((row) => passes(row, { ...query, low: "", high: "" }, places))));
  const shown = rows.filter((row) => passes(row, query, places));
  const sort = query.sort || "place";
  const sign = query.down === "1" ? -1 : 1;
  const rank = (value) => (value === null || value === undefined ? -Infinity : value);
  shown.sort((one, two) => {
    const [a, b] = [rank(one[sort]), rank(two[sort])];
    return sign * (a < b ? -1 : a > b ? 1 : one.place - two.place);
  });
  shownPlaces = shown.map((row) => row.place);
  const scores = shown.map((row) => row.score).filter(isNumber);
  const isAllZero = scores.length > 0 && scores.every((score) => score === 0);
  put(
    main,
    h("p", { class: "soft" }, `${num(shown.length)} of ${num(rows.length)} rollouts, mean score ${num(mean(scores))}. A click opens one; its group stands beside it.`),
    isAllZero ? zeroReasons(shown.filter((row) => row.score === 0), query) : "",
    virtualList(shown, query),
  );
}

// Says at once why all scores of the rows shown are 0: each row counts once, for the first cause that holds.
function zeroReasons(rows, query) {
  const causes = [
    ["grader error", (row) => Boolean(row.reward_error)],
    ["truncated at the length limit", (row) => row.truncated],
    ["empty", (row) => row.length <= 1],
    ["graded, not above 0", () => true],
  ];
  const counts = causes.map(() => 0);
  for (const row of rows) counts[causes.findIndex(([, test]) => test(row))] += 1;
  const parts = causes.map(([label], place) => counts[place] && `${num(counts[place])} ${label} (${percent(counts[place] / rows.length)})`).filter(Boolean);
  const failed = rows.find((row) => row.reward_error);
  const isFiltered = ["low", "high", "flag", "text", "prompt", "source", "agent", "longer", "shorter"].some((key) => query[key]);
  return h("div", { class: "note" }, h("p", {}, `Every score ${isFiltered ? "of these rollouts" : "of the step"} is 0: ${parts.join(", ")}.`),
    failed ? [h("p", {}, `Error of row ${num(failed.place)}:`), h("pre", {}, failed.reward_error)] : "");
}

function histogram(query, rows) {
  const by = query.by || "score";
  const values = rows.map((row) => row[by]).filter(isNumber);
  const kinds = ["score", "reward", "advantage", "length", "entropy", "mismatch", "staleness"];
  const select = choice(kinds.filter((key) => rows.some((row) => isNumber(row[key])) || key === by), by, (value) => update({ by: value, low: "", high: "" }), { "aria-label": "histogram of" });
  if (!values.length) return h("div", { class: "bar" }, h("label", {}, "histogram of", select), h("span", { class: "soft" }, "no values"));
  const low = Math.min(...values);
  const high = Math.max(...values);
  const width = (high - low) / NUM_BINS || 1;
  const bins = Array.from({ length: high === low ? 1 : NUM_BINS }, () => 0);
  for (const value of values) bins[Math.min(bins.length - 1, Math.floor((value - low) / width))] += 1;
  const largest = Math.max(...bins);
  const bars = bins.map((size, number) => {
    const from = low + number * width;
    const to = number === bins.length - 1 ? high : from + width;
    const isOn = query.low !== undefined && query.low !== "" && Math.abs(Number(query.low) - from) < width / 2;
    const bar = h("button", { type: "button", "aria-pressed": String(isOn), "aria-label": `${size} rollouts with ${by} from ${num(from)} to ${num(to)}` }, h("span", { style: { height: `${(100 * size) / largest}%` } }));
    bar.addEventListener("click", () => update(isOn ? { low: "", high: "" } : { low: from - 1e-9, high: to + (number === bins.length - 1 ? 1e-6 : -1e-9), by }));
    bar.addEventListener("mousemove", (event) => showTip(`${num(size)} rollouts\n${by} ${num(from)} to ${num(to)}`, event.clientX, event.clientY));
    bar.addEventListener("mouseleave", hideTip);
    return bar;
  });
  const clear = query.low ? h("button", { onclick: () => update({ low: "", high: "" }) }, "clear the range") : "";
  return h("div", { class: "card" },
    h("div", { class: "bar" }, h("label", {}, "histogram of", select), h("span", { class: "soft" }, "a bar filters"), clear),
    h("div", { class: "histogram" }, bars), h("div", { class: "axis" }, h("span", {}, num(low)), high === low ? "" : h("span", {}, num(high))));
}

// Only the rows in view are elements, however many there are.
function virtualList(rows, query) {
  const head = h("div", { class: "head" }, ROW_COLUMNS.map(([key, title, , kind]) => {
    const isSorted = (query.sort || "place") === key;
    const arrow = isSorted ? (query.down === "1" ? " ↓" : " ↑") : "";
    const sort = () => update({ sort: key, down: isSorted && query.down !== "1" ? "1" : "" });
    return title ? h("button", { class: kind === "num" ? "num" : "", onclick: sort }, title + arrow) : h("span");
  }));
  const space = h("div", { class: "space", style: { height: `${rows.length * ROW_HEIGHT}px` } });
  const list = h("div", { class: "list", style: { "--columns": ROW_COLUMNS.map(([, , width]) => width).join(" ") } }, head, space);
  const open = (row) => go("rollouts", { ...query, place: row.place });
  const elements = new Map();
  const draw = () => {
    const first = Math.max(0, Math.floor(list.scrollTop / ROW_HEIGHT) - 8);
    const last = Math.min(rows.length, Math.ceil((list.scrollTop + list.clientHeight) / ROW_HEIGHT) + 8);
    for (const [number, element] of elements) {
      if (number < first || number >= last) {
        element.remove();
        elements.delete(number);
      }
    }
    for (let number = first; number < last; number++) {
      if (!elements.has(number)) {
        const element = rowElement(rows[number], number, open);
        elements.set(number, element);
        space.append(element);
      }
    }
  };
  list.addEventListener("scroll", draw, { passive: true });
  list.addEventListener("keydown", (event) => {
    const change = { ArrowDown: 1, ArrowUp: -1, j: 1, k: -1 }[event.key];
    const current = document.activeElement.dataset.number;
    if (!change || current === undefined) return;
    event.preventDefault();
    const next = Math.min(rows.length - 1, Math.max(0, Number(current) + change));
    if (!elements.has(next)) {
      list.scrollTop = next * ROW_HEIGHT;
      draw();
    }
    elements.get(next).focus();
  });
  new ResizeObserver(draw).observe(list);
  return list;
}

function rowElement(row, number, open) {
  const cells = ROW_COLUMNS.map(([key, , , kind]) => {
    if (kind === "flags") {
      return h("span", {}, FLAGS.filter(([, , test]) => test(row)).map(([, label, , color]) => h("span", { class: `tag ${color}` }, label)));
    }
    if (kind === "text") return h("span", { class: "two" }, row[key] === null ? "–" : row[key]);
    return h("span", { class: "num" }, num(row[key]));
  });
  const element = h("div", { class: "row", tabindex: "0", role: "button", "data-number": String(number), style: { top: `${number * ROW_HEIGHT}px` } }, cells);
  element.addEventListener("click", () => open(row));
  element.addEventListener("keydown", (event) => {
    if (event.key === "Enter") open(row);
  });
  return element;
}

// Prompts over all steps: which one never improves?
async function promptsPage(main, query) {
  const answer = await ask("prompts", { run: query.run });
  put(main, h("h2", {}, "Prompts over all steps"));
  put(main, indexNote(main, query.run, answer));
  const { prompts } = answer;
  if (!prompts.length) {
    put(main, note("No rollouts are recorded."));
    return;
  }
  const numRepeated = prompts.filter((entry) => entry.is_repeated).length;
  const isOnly = query.only === "1";
  const summary = numRepeated
    ? `${num(answer.num_prompts)} prompts; ${num(answer.num_never_improving)} of those that came several times never scored better than at first, and not the best score either.`
    : `${num(answer.num_prompts)} prompts, each of which came once so far: whether one improves shows when it comes again.`;
  const head = ["prompt", "score over steps", "times", "first", "last", "best", "steps"];
  const rows = prompts.filter((entry) => !isOnly || entry.never_improves).map((entry) => {
    const open = () => go("rollouts", { run: query.run, step: entry.last_step, prompt: entry.prompt });
    return h("tr", { class: "click", tabindex: "0", onclick: open, onkeydown: (event) => event.key === "Enter" && open() },
      h("td", {}, h("div", { class: "mono" }, entry.text || "–"), h("div", { class: "soft", title: entry.prompt }, tail(entry.prompt), " "), entry.never_improves ? h("span", { class: "tag bad" }, "never improves") : ""),
      h("td", { class: "num" }, sparkline(entry.curve)),
      [num(entry.seen), num(entry.first), num(entry.last), num(entry.best), `${entry.first_step}–${entry.last_step}`].map((text) => h("td", { class: "num" }, text)));
  });
  put(
    main,
    h("p", {}, summary),
    h("div", { class: "bar" }, toggle("only those that never improve", isOnly, () => update({ only: isOnly ? "" : "1" }))),
    answer.num_prompts > prompts.length ? note(`The first ${num(prompts.length)} are shown, those with the lowest best score first.`) : "",
    h("div", { class: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, head.map((text, place) => h("th", { class: place ? "num" : "" }, text)))), h("tbody", {}, rows))),
  );
}
