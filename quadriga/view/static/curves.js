// SPDX-License-Identifier: Apache-2.0
// Any metric of one or several runs against steps, tokens or time.
"use strict";

const FIRST_METRICS = [
  "critic/score/mean", "actor/entropy", "response_length/mean", "response_length/clip_ratio",
  "rollout/log_prob_diff_mean", "actor/grad_norm", "rows/groups_without_spread", "timing_s/step", "train/loss",
];

// Metrics of a run, with numbers of its rollouts as `rows/...`; each a Map from step to value.
async function loadCurves(run) {
  const [metrics, steps] = await Promise.all([ask("metrics", { run }), ask("steps", { run })]);
  const curves = new Map();
  const add = (name, stepsOfCurve, values) => {
    const points = new Map();
    values.forEach((value, place) => {
      if (isNumber(value)) points.set(stepsOfCurve[place], value);
    });
    if (points.size) curves.set(name, points);
  };
  for (const [name, values] of Object.entries(metrics.columns)) add(name, metrics.steps, values);
  for (const [name, values] of Object.entries(steps.step.columns)) add(`rows/${name}`, steps.step.steps, values);
  return { run, curves, steps: metrics.steps, recorded: new Set(steps.step.steps), indexed: steps.indexed, total: steps.total };
}

// Values of the horizontal axis by step.
function axisOf(loaded, kind) {
  if (kind === "step") return (step) => step;
  const curve = loaded.curves.get(kind === "tokens" ? "perf/total_num_tokens" : "timing_s/step") || new Map();
  const sums = new Map();
  let sum = 0;
  for (const step of loaded.steps) {
    sum += curve.get(step) || 0;
    sums.set(step, sum);
  }
  return (step) => sums.get(step) ?? null;
}

// An exponential moving average without the bias of its beginning.
function smoothed(values, weight) {
  let average = 0;
  let norm = 0;
  return values.map((value) => {
    if (!isNumber(value)) return value;
    average = weight * average + (1 - weight) * value;
    norm = weight * norm + 1 - weight;
    return average / norm;
  });
}

async function curvesPage(main, query, names) {
  const others = (query.with || "").split("\n").filter((name) => names.includes(name) && name !== query.run);
  const runs = [query.run, ...others];
  const loaded = await Promise.all(runs.map(loadCurves));
  const all = [...new Set(loaded.flatMap((entry) => [...entry.curves.keys()]))].sort();
  if (!all.length) {
    put(main, note(`${query.run} has no metrics yet.`));
    return;
  }
  let chosen = (query.metrics || "").split("\n").filter((name) => all.includes(name));
  if (!chosen.length) chosen = FIRST_METRICS.filter((name) => all.includes(name));
  const x = query.x || "step";
  const weight = Number(query.smooth || 0);

  const search = h("input", { type: "search", placeholder: "filter metrics  ( / )", "aria-label": "filter metrics" });
  const list = h("div");
  const fill = () => {
    const wanted = search.value.toLowerCase();
    const groups = new Map();
    for (const name of all.filter((text) => text.toLowerCase().includes(wanted))) {
      const group = name.split("/")[0];
      groups.set(group, [...(groups.get(group) || []), name]);
    }
    list.replaceChildren(...[...groups].map(([group, members]) => {
      const isOpen = Boolean(wanted) || members.some((name) => chosen.includes(name));
      return h("details", { open: isOpen }, h("summary", {}, `${group} (${members.length})`), members.map((name) => {
        const box = h("input", { type: "checkbox", checked: chosen.includes(name) });
        box.addEventListener("change", () => {
          chosen = box.checked ? [...chosen, name] : chosen.filter((text) => text !== name);
          update({ metrics: chosen.join("\n") });
        });
        return h("label", { title: name }, box, " ", name.slice(group.length + 1) || name);
      }));
    }));
  };
  search.addEventListener("input", fill);
  fill();

  const smooth = h("input", { type: "range", min: "0", max: "0.98", step: "0.02", value: String(weight), "aria-label": "smoothing" });
  smooth.value = String(weight);
  smooth.addEventListener("change", () => update({ smooth: smooth.value === "0" ? "" : smooth.value }));
  const more = names.filter((name) => !runs.includes(name));
  const controls = h("div", { class: "bar" },
    h("label", {}, "against", choice([["step", "steps"], ["tokens", "tokens"], ["time", "time"]], x, (value) => update({ x: value }))),
    h("label", {}, "smoothing", smooth, weight ? num(weight) : "off"),
    toggle("log scale", query.log === "1", () => update({ log: query.log === "1" ? "" : "1" })),
    more.length ? h("label", {}, "compare with", choice([["", "another run…"], ...more.map((name) => [name, name])], "", (name) => update({ with: [...others, name].join("\n") }))) : null,
    others.map((name) => toggle(`${name} ✕`, true, () => update({ with: others.filter((text) => text !== name).join("\n") }))),
  );
  const cards = h("div", { class: "grid" });
  put(
    main,
    h("div", { class: "split" }, h("div", { class: "names" }, search, list), h("div", {}, controls,
      h("p", { class: "soft" }, "A click on a point opens the rollouts of its step."),
      indexNote(main, query.run, loaded[0]),
      cards)),
  );
  for (const name of chosen) cards.append(curveCard(name, loaded, x, weight, query.log === "1"));
}

// Range of the vertical axis. That of a constant is as small as its value.
function verticalRange(_, low, high) {
  if (!isNumber(low) || !isNumber(high)) return [0, 1];
  if (low !== high) return uPlot.rangeNum(low, high, 0.1, true);
  const margin = Math.abs(low) / 10;
  return low === 0 ? [0, 1] : [low - margin, low + margin];
}

function curveCard(name, loaded, x, weight, isLog) {
  const place = h("div", { style: { height: "250px" } });
  const last = [...(loaded[0].curves.get(name) || new Map()).values()].pop();
  const card = h("section", { class: "card" }, h("h3", {}, h("span", {}, name), h("span", { class: "soft num" }, num(last, 4))), place);
  const tables = [];
  const series = [{ label: { step: "step", tokens: "tokens", time: "seconds" }[x], value: (_, value) => (isNumber(value) ? num(value, 5) : "") }];
  const owners = [null];
  loaded.forEach((entry, number) => {
    const points = entry.curves.get(name);
    if (!points) return;
    const axis = axisOf(entry, x);
    const steps = [...points.keys()].filter((step) => axis(step) !== null);
    const values = steps.map((step) => (isLog && points.get(step) <= 0 ? null : points.get(step)));
    const color = palette[number % palette.length];
    const stepAt = new Map(steps.map((step) => [axis(step), step]));
    const common = { stroke: color, spanGaps: true, value: (_, value) => (isNumber(value) ? num(value, 4) : ""), points: { show: steps.length < 60, size: 5 } };
    const add = (column, options) => {
      tables.push([steps.map(axis), column]);
      series.push({ ...common, ...options });
      owners.push({ entry, stepAt });
    };
    if (weight) add(values, { label: `${entry.run} raw`, stroke: `${color}55`, width: 1, points: { show: false } });
    add(weight ? smoothed(values, weight) : values, { label: entry.run, width: 2 });
  });
  if (!tables.length) {
    place.replaceWith(h("p", { class: "soft" }, "None of the runs has it."));
    return card;
  }
  const data = uPlot.join(tables);
  // The width is known once the card stands in the page.
  requestAnimationFrame(() => {
    if (!place.isConnected) return;
    const grid = { stroke: css("--line"), width: 1 };
    const axes = [
      { stroke: css("--soft"), grid, ticks: grid, values: (_, ticks) => ticks.map((tick) => num(tick)) },
      { stroke: css("--soft"), grid, ticks: grid, size: 62, values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : num(tick))) },
    ];
    const plot = new uPlot({
      width: place.clientWidth, height: 225, axes, series,
      scales: { x: { time: false }, y: isLog ? { distr: 3 } : { range: verticalRange } },
      legend: { live: true, show: series.length < 10 },
      cursor: { focus: { prox: 24 } }, focus: { alpha: 0.35 },
    }, data, place);
    place.style.height = "auto";
    plot.over.style.cursor = "pointer";
    plot.over.addEventListener("click", () => openStep(plot, owners));
    new ResizeObserver(() => plot.setSize({ width: place.clientWidth, height: 225 })).observe(place);
  });
  return card;
}

// Open the rollouts of the point nearest to the cursor.
function openStep(plot, owners) {
  const { idx, top } = plot.cursor;
  if (idx === null || idx === undefined) return;
  let nearest = null;
  let distance = Infinity;
  for (let number = 1; number < owners.length; number++) {
    const value = plot.data[number][idx];
    const here = isNumber(value) ? Math.abs(plot.valToPos(value, "y") - top) : Infinity;
    if (here < distance) {
      distance = here;
      nearest = owners[number];
    }
  }
  if (!nearest) return;
  const step = nearest.stepAt.get(plot.data[0][idx]);
  go("rollouts", { run: nearest.entry.run, step });
}
