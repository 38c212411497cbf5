// SPDX-License-Identifier: Apache-2.0
// One rollout: its facts, its group, its tokens in colors, its turns.
"use strict";

const MAX_PROMPT_SPANS = 2000;
const MAX_SIBLINGS = 64;
const IMAGE = /^data:image\/(png|jpeg|gif|webp);base64,[A-Za-z0-9+/=]+$/;

// Values of the tokens of a response by the kind of color; null where a token has none.
const OVERLAYS = {
  none: ["no color", () => null],
  log_prob: ["log-prob", (columns) => columns.rollout_log_probs],
  advantage: ["advantage", (columns) => columns.advantages],
  mismatch: ["rollout/trainer mismatch", mismatches],
  entropy: ["entropy", (columns) => columns.entropies],
  version: ["weight version", (columns) => columns.token_versions],
  staleness: ["staleness", (columns) => columns.token_staleness],
  score: ["score of the token", (columns) => columns.token_scores],
  mask: ["mask", (columns) => columns.response_mask],
};

function mismatches(columns) {
  const { log_probs: trainer, rollout_log_probs: rollout } = columns;
  return trainer && rollout ? trainer.map((value, place) => (isNumber(value) && isNumber(rollout[place]) ? Math.abs(value - rollout[place]) : null)) : null;
}

const isTrained = (columns, place) => Boolean((columns.trained_mask || columns.response_mask || [])[place]);

// Colors of values: [function from a value to a color, what stands at the low end of the legend, and at the high end].
function colorsOf(kind, values) {
  const known = values.filter(isNumber);
  const mix = (color, share) => `color-mix(in srgb, ${color} ${Math.round(Math.min(1, share) * 80)}%, transparent)`;
  if (kind === "version") {
    const versions = [...new Set(known)].sort((one, two) => one - two);
    const colorOf = (value) => (value < 0 ? "transparent" : mix(palette[versions.indexOf(value) % palette.length], 0.6));
    const swatches = versions.filter((value) => value >= 0).map((value) => h("span", {}, h("span", { class: "swatch", style: { background: colorOf(value) } }), num(value)));
    return [colorOf, swatches, ""];
  }
  if (kind === "log_prob") return [(value) => mix("#e5484d", -value / 5), "0", "−5 nats or less"];
  if (kind === "advantage" || kind === "score") {
    const largest = known.reduce((most, value) => Math.max(most, Math.abs(value)), 0) || 1;
    return [(value) => mix(value < 0 ? "#e5484d" : "#1fa971", Math.abs(value) / largest), `${num(-largest)}`, num(largest)];
  }
  const largest = known.reduce((most, value) => Math.max(most, value), 0) || 1;
  const color = { mismatch: "#d6409f", entropy: "#3b82f6", staleness: "#ef7d22" }[kind];
  return [(value) => mix(color, value / largest), "0", num(largest)];
}

async function rolloutView(main, query, rows) {
  const place = Number(query.place);
  const start = Number(query.start || 0);
  const summary = rows[place];
  if (!summary) throw new Error(`Step ${query.step} has no row ${place}; it has ${rows.length}.`);
  const order = shownPlaces.includes(place) ? shownPlaces : rows.map((row) => row.place);
  const position = order.indexOf(place);
  const open = (target) => () => target !== undefined && update({ place: target, start: "" });
  const back = () => update({ place: "", start: "" }, false);
  Object.assign(pageKeys, { k: open(order[position - 1]), j: open(order[position + 1]), Escape: back });
  put(
    main,
    h("div", { class: "bar" },
      h("button", { onclick: back, title: "key Escape" }, "← all rollouts of the step"),
      h("button", { onclick: open(order[position - 1]), disabled: position <= 0, title: "key k" }, "previous"),
      h("button", { onclick: open(order[position + 1]), disabled: position >= order.length - 1, title: "key j" }, "next"),
      h("span", { class: "soft" }, `row ${num(place)} of 0 to ${num(rows.length - 1)}${order.length < rows.length ? `; ${num(order.length)} are in the list` : ""}`),
      h("span", { class: "keys" }, h("span", {}, h("kbd", {}, "j"), " ", h("kbd", {}, "k"), " next, previous"), h("span", {}, h("kbd", {}, "Esc"), " list"))),
    trainedSentence(summary),
    siblingCards(rows, summary),
  );
  // The card of this rollout is in view, without the page being scrolled.
  const card = main.querySelector('.siblings [aria-current="true"]');
  if (card) card.parentElement.scrollLeft = card.offsetLeft - card.parentElement.offsetLeft - 40;
  const { run, kind, step } = query;
  const details = await ask("rollout", { run, kind, step, place, start });
  put(main, facts(details, summary));
  if (details.image_hash) put(main, await images({ run, kind, step, place }));
  const view = query.view || (details.messages ? "turns" : "rendered");
  const views = [["rendered", "rendered tokens"], ["turns", "conversation"], ["row", "data row and grading"]];
  put(main, h("div", { class: "bar" }, views.map(([key, label]) => toggle(label, view === key, () => update({ view: key })))));
  if (view === "turns") conversation(main, details);
  else if (view === "row") dataRow(main, details);
  else rendered(main, details, query);
}

async function images(query) {
  try {
    const answer = await ask("images", query);
    const shown = answer.images.filter((url) => IMAGE.test(url)).map((url) => h("img", { src: url, alt: "image of the prompt", style: { "max-height": "14rem", "max-width": "100%" } }));
    return h("div", {}, shown, answer.note ? note(answer.note) : "");
  } catch (error) {
    return note(error.message);
  }
}

// Was it trained, with which advantage? The first thing that people ask.
function trainedSentence(row) {
  if (row.not_computed === "validation") return h("p", {}, "A validation rollout: nothing was learned from it.");
  if (row.not_computed) return note(`Not trained: ${row.not_computed}.`);
  const share = row.trained < row.generated ? `${num(row.trained)} of ${num(row.generated)}` : `all ${num(row.generated)}`;
  const advantage = row.advantage === undefined ? "" : `, with a mean advantage of ${num(row.advantage)}`;
  return h("p", {}, row.trained ? `Trained: ${share} generated tokens${advantage}.` : "Not trained: every token was rejected.");
}

function siblingCards(rows, current) {
  const group = rows.filter((row) => row.uid === current.uid);
  if (group.length < 2) return "";
  const scores = group.map((row) => row.score).filter(isNumber);
  const cards = group.slice(0, MAX_SIBLINGS).map((row) => {
    const open = () => update({ place: row.place, start: "" });
    return h("div", { class: "card", tabindex: "0", role: "button", "aria-current": String(row.place === current.place), onclick: open, onkeydown: (event) => event.key === "Enter" && open() },
      h("div", {}, h("b", {}, `score ${num(row.score)}`), h("span", { class: "soft" }, `  adv. ${num(row.advantage)} · ${num(row.length)} tokens${row.agent ? ` · ${row.agent}` : ""}`)),
      h("div", { class: "mono" }, row.text));
  });
  const left = group.length > MAX_SIBLINGS ? ` The first ${MAX_SIBLINGS} are shown.` : "";
  const spread = scores.length && scores.every((score) => score === scores[0]) ? " All scores are equal: the group gives no gradient." : "";
  return h("section", {}, h("h3", {}, `${num(group.length)} rollouts of this prompt, mean score ${num(mean(scores))}.${spread}${left}`), h("div", { class: "siblings" }, cards));
}

function facts(details, summary) {
  const entries = {
    score: num(details.score), reward: num(details.reward), baseline: num(details.reward_baseline), truth: summary.truth,
    "ended by": details.finish_reason, truncated: summary.truncated || null, length: num(details.length), agent: details.agent,
    staleness: isNumber(summary.staleness) ? num(summary.staleness) : null, entropy: num(summary.entropy), mismatch: num(summary.mismatch),
    "data source": details.data_source, row: details.source_row && tail(details.source_row), rollout: details.rollout_id, image: details.image_hash,
  };
  for (const [name, value] of Object.entries(details.reward_parts || {})) {
    entries[`graded: ${name}`] = typeof value === "number" ? num(value) : String(typeof value === "object" ? JSON.stringify(value) : value).slice(0, 200);
  }
  const shown = Object.entries(entries).filter(([, value]) => value !== null && value !== undefined && value !== "–" && value !== "");
  const error = details.reward_error ? h("details", { class: "note error", open: true }, h("summary", {}, "The grader failed"), h("pre", {}, details.reward_error)) : "";
  return h("div", {}, error, h("div", { class: "facts" }, shown.map(([name, value]) => h("div", {}, h("span", { class: "soft" }, `${name} `), h("b", {}, String(value))))));
}

function rendered(main, details, query) {
  const { columns } = details;
  const available = Object.keys(OVERLAYS).filter((key) => key === "none" || OVERLAYS[key][1](columns));
  const fallback = columns.advantages ? "advantage" : "log_prob";
  const kind = available.includes(query.color) ? query.color : available.includes(fallback) ? fallback : "none";
  const values = OVERLAYS[kind][1](columns);
  const container = h("div", { class: "tokens", tabindex: "0", "aria-label": "tokens" });
  const readout = h("span", { class: "soft" }, "Numbers of a token stand at the pointer; ← and → walk.");
  const copyButton = (label, text) => {
    const button = h("button", {}, label);
    button.addEventListener("click", () => copy(text(), button));
    return button;
  };
  const ids = () => [...details.prompt.ids, ...details.response.ids].join(", ");
  const text = () => [...details.prompt.texts, ...details.response.texts].join("");
  const legend = h("span", { class: "legend" });
  let color = null;
  if (values && kind !== "mask") {
    const [colorOf, low, high] = colorsOf(kind, values);
    color = colorOf;
    put(legend, low, kind === "version" ? "" : gradient(colorOf, kind, values), high);
  } else if (kind === "mask") {
    legend.append("dim: not of the model; underlined: of the model, but not trained");
  }
  put(main, h("div", { class: "bar" },
    h("label", {}, "colored by", choice(available.map((key) => [key, OVERLAYS[key][0]]), kind, (value) => update({ color: value }))), legend,
    copyButton("copy text", text), copyButton("copy ids", ids), readout));
  windowBar(main, details);
  const spans = [];
  const addSpans = (part, isPrompt, from) => {
    const special = new Set(part.special);
    const fragment = document.createDocumentFragment();
    for (let place = from; place < part.ids.length; place++) {
      const span = document.createElement("span");
      span.textContent = part.texts[place] === "" ? "▯" : part.texts[place];
      span.dataset.place = String(isPrompt ? place - part.ids.length : place);
      const isGenerated = !isPrompt && (columns.response_mask || [])[place];
      if (special.has(place)) span.className = "special";
      if (!isGenerated) span.classList.add("dim");
      if (!isPrompt && color && isGenerated && isNumber(values[place])) span.style.background = color(values[place]);
      if (kind === "mask" && isGenerated && !isTrained(columns, place)) span.style.textDecoration = "underline";
      fragment.append(span);
      spans.push(span);
    }
    return fragment;
  };
  const firstShown = Math.max(0, details.prompt.ids.length - MAX_PROMPT_SPANS);
  const numHidden = firstShown + details.prompt_start;
  if (numHidden) container.append(h("div", { class: "soft" }, `… ${num(numHidden)} earlier tokens of the prompt`));
  container.append(addSpans(details.prompt, true, firstShown), addSpans(details.response, false, 0));
  let current = -1;
  const point = (number, box) => {
    if (spans[current]) spans[current].classList.remove("at");
    current = number;
    spans[current].classList.add("at");
    const rectangle = box || spans[current].getBoundingClientRect();
    showTip(tokenText(details, Number(spans[current].dataset.place)), rectangle.x, rectangle.y);
  };
  container.addEventListener("mousemove", (event) => {
    const number = spans.indexOf(event.target);
    if (number >= 0) point(number, { x: event.clientX, y: event.clientY });
    else hideTip();
  });
  container.addEventListener("mouseleave", hideTip);
  container.addEventListener("keydown", (event) => {
    const change = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!change) return;
    event.preventDefault();
    const from = current < 0 ? Math.min(details.prompt.ids.length - firstShown, spans.length) - 1 : current;
    point(Math.max(0, Math.min(spans.length - 1, from + change)));
    spans[current].scrollIntoView({ block: "nearest" });
  });
  put(main, container);
}

// A response too long to be sent at once is shown in parts.
function windowBar(main, details) {
  const end = details.start + details.response.ids.length;
  if (details.start === 0 && end >= details.length) return;
  const size = 20000;
  put(main, note(`Tokens ${num(details.start)} to ${num(end)} of ${num(details.length)} are shown. Copies hold these.`), h("div", { class: "bar" },
    h("button", { disabled: details.start === 0, onclick: () => update({ start: Math.max(0, details.start - size) || "" }) }, "earlier tokens"),
    h("button", { disabled: end >= details.length, onclick: () => update({ start: end }) }, "later tokens")));
}

function gradient(colorOf, kind, values) {
  const canvas = h("canvas", { width: 90, height: 12 });
  const context = canvas.getContext("2d");
  const known = values.filter(isNumber);
  const largest = kind === "log_prob" ? 5 : known.reduce((most, value) => Math.max(most, Math.abs(value)), 0) || 1;
  for (let x = 0; x < 90; x++) {
    const share = x / 89;
    const value = kind === "log_prob" ? -5 * share : kind === "advantage" || kind === "score" ? (2 * share - 1) * largest : share * largest;
    // A canvas does not know color-mix in every browser; an element does.
    const probe = h("span", { style: { color: colorOf(value) } });
    document.body.append(probe);
    context.fillStyle = getComputedStyle(probe).color;
    probe.remove();
    context.fillRect(x, 0, 1, 12);
  }
  return canvas;
}

// Numbers of a token; places of the prompt are negative.
function tokenText(details, place) {
  const isPrompt = place < 0;
  const part = isPrompt ? details.prompt : details.response;
  const number = isPrompt ? part.ids.length + place : place;
  const lines = [`${JSON.stringify(part.texts[number])}  id ${part.ids[number]}`];
  if (isPrompt) return `${lines[0]}\nprompt`;
  const { columns } = details;
  lines.push(`token ${num(details.start + place)} of the response`);
  if (columns.echo_mask && columns.echo_mask[place]) lines.push("not written by the model, but learned (echo_coeff)");
  else if (!(columns.response_mask || [])[place]) lines.push("not written by the model: not trained");
  else if (details.not_computed) lines.push(`not trained: ${details.not_computed}`);
  else lines.push(isTrained(columns, place) ? "trained" : "rejected, not trained");
  const add = (label, value) => isNumber(value) && lines.push(`${label} ${num(value, 4)}`);
  const at = (name) => (columns[name] || [])[place];
  add("advantage", at("advantages"));
  add("log-prob, rollout", at("rollout_log_probs"));
  add("log-prob, trainer", at("log_probs"));
  if (isNumber(at("log_probs")) && isNumber(at("rollout_log_probs"))) add("ratio", Math.exp(at("log_probs") - at("rollout_log_probs")));
  add("log-prob, reference", at("ref_log_probs"));
  add("log-prob, teacher", at("teacher_log_probs"));
  add("entropy", at("entropies"));
  add("score", at("token_scores"));
  add("return", at("returns"));
  add("value", at("values"));
  add("importance weight", at("rollout_is_weights"));
  add("weight version", at("token_versions"));
  add("staleness", at("token_staleness"));
  return lines.join("\n");
}

function contentNodes(content) {
  if (content === null || content === undefined) return [];
  if (typeof content === "string") return [h("pre", {}, content)];
  if (!Array.isArray(content)) return [h("pre", {}, JSON.stringify(content, null, 2))];
  return content.map((part) => {
    if (part && typeof part.text === "string") return h("pre", {}, part.text);
    const url = part && part.image_url ? part.image_url.url || part.image_url : part && part.image;
    if (typeof url === "string" && IMAGE.test(url)) return h("img", { src: url, alt: "image of the message", style: { "max-width": "20rem" } });
    return h("div", { class: "soft" }, `[${(part && part.type) || "part"}] ${typeof url === "string" ? url.slice(0, 120) : ""}`);
  });
}

function conversation(main, details) {
  const block = (role, nodes, earned = "") => h("div", { class: `message ${["assistant", "tool"].includes(role) ? role : ""}` }, h("h4", {}, h("span", {}, role), h("span", {}, earned)), nodes);
  const earnedBy = (turn) => {
    const parts = [`tokens ${num(turn.start)}–${num(turn.end)}`];
    if (isNumber(turn.score)) parts.push(`earned ${num(turn.score)}`);
    if (isNumber(turn.advantage)) parts.push(`mean advantage ${num(turn.advantage)}`);
    return parts.join(" · ");
  };
  put(main, block("prompt", [h("pre", {}, details.prompt.texts.join(""))]));
  if (Array.isArray(details.messages)) {
    let number = 0;
    for (const message of details.messages) {
      const role = String(message.role || "message");
      const turn = role === "assistant" ? details.turns[number++] : null;
      const calls = (message.tool_calls || []).map((call) => {
        const called = call.function || call;
        const values = typeof called.arguments === "string" ? called.arguments : JSON.stringify(called.arguments);
        return h("pre", { class: "soft" }, `→ ${called.name}(${values})`);
      });
      put(main, block(message.name ? `${role} ${message.name}` : role, [contentNodes(message.content), calls], turn ? earnedBy(turn) : ""));
    }
  } else {
    windowBar(main, details);
    put(main, block("assistant", [h("pre", {}, details.response.texts.join(""))], details.turns[0] ? earnedBy(details.turns[0]) : ""));
    if (typeof details.messages === "string") put(main, note("The messages are too long to be shown; the rendered view has their tokens."));
  }
  if (details.tool_rewards && Object.keys(details.tool_rewards).length) put(main, h("h3", {}, "Rewards of tools"), h("pre", {}, JSON.stringify(details.tool_rewards, null, 2)));
  if (details.turn_scores && details.turn_scores.length) put(main, h("p", {}, `Scores of the simulated user, in order: ${[details.turn_scores].flat().map((value) => num(value)).join(", ")}`));
}

function dataRow(main, details) {
  for (const [title, value] of [["Columns of the data row", details.row], ["What graders returned beside the score", details.reward_parts]]) {
    put(main, h("h3", {}, title), value === null ? h("p", { class: "soft" }, "none recorded, or removed to save space") : h("pre", {}, typeof value === "string" ? value : JSON.stringify(value, null, 2)));
  }
}
