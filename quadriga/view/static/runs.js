// SPDX-License-Identifier: Apache-2.0
// The table of runs, and the difference of their configurations.
"use strict";

async function runsPage(main, query, names) {
  const chosen = new Set((query.compare || "").split("\n").filter(Boolean));
  const compareLink = h("a", { href: "#" }, "Curves of the chosen runs");
  const tableBody = h("tbody");
  const diffPlace = h("div");
  const head = ["", "run", "state", "step", "score", "", "time", "model", "estimator", "changed"];
  put(
    main,
    h("h2", {}, `${names.length} ${names.length === 1 ? "run" : "runs"}`),
    h("div", { class: "bar" }, compareLink, h("span", { class: "soft" }, "A row opens its curves; tick two or more to compare their configurations.")),
    h("div", { class: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, head.map((text) => h("th", {}, text)))), tableBody)),
    diffPlace,
  );

  async function showDifferences() {
    const runs = [...chosen];
    compareLink.hidden = runs.length < 1;
    compareLink.href = address("curves", { run: runs[0] || "", with: runs.slice(1).join("\n") });
    diffPlace.replaceChildren();
    if (runs.length) diffPlace.append(await differences(runs));
  }

  const rows = names.map((name) => {
    const cells = h("tr", { class: "click", tabindex: "0" }, h("td"), h("td", {}, name), h("td", { colspan: "8", class: "soft" }, "…"));
    cells.addEventListener("click", (event) => {
      if (!event.target.closest("input")) go("curves", { run: name });
    });
    cells.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && event.target === cells) go("curves", { run: name });
    });
    tableBody.append(cells);
    return cells;
  });
  showDifferences();
  // One after the other, so that the first rows are there at once.
  for (const [place, name] of names.entries()) {
    if (!main.isConnected) return;
    const box = h("input", { type: "checkbox", "aria-label": `compare ${name}`, checked: chosen.has(name) });
    box.addEventListener("change", () => {
      if (box.checked) chosen.add(name);
      else chosen.delete(name);
      history.replaceState(null, "", address("runs", { ...route().query, compare: [...chosen].join("\n") }));
      showDifferences();
    });
    try {
      rows[place].replaceChildren(h("td", {}, box), ...summaryCells(await ask("summary", { run: name })));
    } catch (error) {
      rows[place].replaceChildren(h("td", {}, box), h("td", {}, name), h("td", { colspan: "8" }, note(error.message, "error")));
    }
  }
}

// A date in the reader's time zone, as in 2026-01-31 17:05.
function dateText(date) {
  const local = new Date(date.getTime() - 60000 * date.getTimezoneOffset());
  return local.toISOString().slice(0, 16).replace("T", " ");
}

function summaryCells(summary) {
  const changed = summary.changed ? dateText(new Date(summary.changed * 1000)) : "–";
  const last = summary.curve.length ? summary.curve[summary.curve.length - 1] : null;
  const score = summary.curve.length ? `${num(summary.curve[0])} → ${num(last)}` : "–";
  const total = summary.last_step ? ` / ${num(summary.last_step)}` : "";
  return [
    h("td", {}, h("b", {}, summary.run), summary.problems.map((problem) => h("div", { class: "soft" }, problem))),
    h("td", {}, h("span", { class: `state ${summary.state}` }, summary.state)),
    h("td", { class: "num" }, `${num(summary.step)}${total}`),
    h("td", { class: "num", title: summary.headline }, score),
    h("td", { class: "running" }, sparkline(summary.curve)),
    h("td", { class: "num" }, duration(summary.seconds)),
    h("td", {}, summary.model || "–"),
    h("td", {}, summary.estimator || "–"),
    h("td", { class: "soft" }, changed),
  ];
}

// A table of the keys in which runs differ; of one run, in which its resumed parts do.
async function differences(runs) {
  const columns = [];
  try {
    for (const run of runs) {
      const configuration = await ask("configuration", { run });
      if (runs.length === 1) {
        for (const [step, values] of Object.entries(configuration.earlier)) columns.push([`from step ${step}`, values]);
      }
      columns.push([runs.length === 1 ? "newest steps" : run, configuration.values]);
    }
  } catch (error) {
    return note(error.message, "error");
  }
  const title = h("h3", {}, runs.length === 1 ? `Configuration of ${runs[0]}` : "Keys in which the configurations differ");
  const keys = [...new Set(columns.flatMap(([, values]) => Object.keys(values)))].sort();
  const isShown = (key) => columns.length === 1 || new Set(columns.map(([, values]) => JSON.stringify(values[key]))).size > 1;
  const shown = keys.filter(isShown);
  const search = h("input", { type: "search", placeholder: "filter keys", "aria-label": "filter keys" });
  const body = h("tbody");
  const fill = () => {
    const wanted = search.value.toLowerCase();
    body.replaceChildren(
      ...shown.filter((key) => key.toLowerCase().includes(wanted)).map((key) =>
        h("tr", {}, h("td", { class: "mono" }, key), columns.map(([, values]) => h("td", { class: "mono" }, key in values ? JSON.stringify(values[key]) : "–")))),
    );
  };
  search.addEventListener("input", fill);
  fill();
  if (!shown.length) return h("div", {}, title, h("p", {}, columns.length > 1 ? "There are none." : "No configuration is written."));
  const head = h("tr", {}, h("th", {}, "key"), columns.map(([name]) => h("th", {}, name)));
  return h("div", {}, title, h("div", { class: "bar" }, search), h("div", { class: "scroll" }, h("table", {}, h("thead", {}, head), body)));
}
