// SPDX-License-Identifier: Apache-2.0
// Pages by their address, the choice of the run, keys, and refreshing while a run goes on.
"use strict";

const PAGES = {
  runs: ["Runs", runsPage],
  curves: ["Curves", curvesPage],
  rollouts: ["Rollouts", rolloutsPage],
  prompts: ["Prompts", promptsPage],
  coverage: ["Coverage", coveragePage],
  time: ["Time", timePage],
  health: ["Health", healthPage],
};
const mainElement = document.getElementById("main");
const runSelect = document.getElementById("run");
const noticeElement = document.getElementById("notice");
let runNames = [];
let shown = "";

function showNotice(text, kind = "") {
  noticeElement.textContent = text;
  noticeElement.className = kind;
  noticeElement.hidden = !text;
}

async function show() {
  const { page, query } = route();
  const [title, render] = PAGES[page] || PAGES.runs;
  if (!runNames.length) return;
  if (!runNames.includes(query.run)) {
    if (query.run) showNotice(`There is no run ${query.run} any more.`, "error");
    query.run = runNames[0];
  }
  hideTip();
  runSelect.value = query.run;
  document.title = `${title} · ${query.run} · Quadriga`;
  for (const link of document.querySelectorAll("#nav a")) {
    const name = link.dataset.page;
    link.href = address(name, { run: query.run, step: query.step });
    if (name === page) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  // Filled beside the document and then put in, so that a newer page never mixes with an older one.
  const place = h("div");
  const isSamePage = shown === page;
  shown = page;
  const scroll = isSamePage ? scrollY : 0;
  mainElement.replaceChildren(place);
  try {
    await render(place, query, runNames);
  } catch (error) {
    place.append(note(error.message, "error"));
  }
  if (place.isConnected) scrollTo(0, scroll);
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
}

document.getElementById("theme").addEventListener("click", () => {
  const theme = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  setTheme(theme);
  try {
    localStorage.setItem("quadriga-theme", theme);
  } catch {
    // A page from a file may have no storage; the choice lasts until it is closed.
  }
  show();
});

document.addEventListener("keydown", (event) => {
  if (event.target.closest("input, select, textarea") || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "r") reload();
  const number = Number(event.key);
  const page = Object.keys(PAGES)[number - 1];
  if (page) go(page, { run: route().query.run, step: route().query.step });
  else if (event.key === "/") {
    const search = document.querySelector("main input[type=search]");
    if (search) {
      search.focus();
      event.preventDefault();
    }
  } else if (event.key in pageKeys) {
    pageKeys[event.key]();
    event.preventDefault();
  }
});

// While a run goes on, says that it has new steps; the page itself changes only when asked.
let seen = { run: "", total: 0 };

async function lookForSteps() {
  const run = runSelect.value;
  if (document.hidden) return;
  try {
    const { total } = await ask("progress", { run });
    if (seen.run === run && total > seen.total) {
      showNotice("The run has new steps. ");
      put(noticeElement, h("button", { onclick: reload }, "show them"), " or press r");
    }
    if (seen.run !== run) seen = { run, total };
  } catch (error) {
    showNotice(error.message, "error");
  }
}

function reload() {
  rowCache.key = "";
  seen.run = "";
  showNotice("");
  show();
}

async function start() {
  let theme = null;
  try {
    theme = localStorage.getItem("quadriga-theme");
  } catch {
    theme = null;
  }
  setTheme(theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light"));
  for (const [place, [name, [title]]] of Object.entries(PAGES).entries()) {
    document.getElementById("nav").append(h("a", { href: `#${name}`, "data-page": name, title: `key ${place + 1}` }, title));
  }
  try {
    runNames = (await ask("runs")).runs;
  } catch (error) {
    mainElement.replaceChildren(note(error.message, "error"));
    return;
  }
  runSelect.replaceChildren(...runNames.map((name) => h("option", { value: name }, name)));
  runSelect.addEventListener("change", () => update({ run: runSelect.value, step: "", place: "" }, false));
  window.addEventListener("hashchange", () => {
    for (const key of Object.keys(pageKeys)) delete pageKeys[key];
    showNotice("");
    show();
  });
  if (embedded) mainElement.before(h("details", { class: `note ${embedded.notes.length > 1 ? "" : "plain"}` }, h("summary", {}, "Exported page"), embedded.notes.map((text) => h("p", {}, text))));
  else setInterval(lookForSteps, 5000);
  await show();
}
start();
