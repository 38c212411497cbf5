// SPDX-License-Identifier: Apache-2.0
// What all pages use: questions to the server or to the data of an exported file, elements, numbers.
"use strict";

const embeddedElement = document.getElementById("embedded");
const embedded = embeddedElement ? JSON.parse(embeddedElement.textContent) : null;
const token = new URLSearchParams(location.search).get("token") || "";

// Ask for data. Texts of the answer are data: they only ever become text of elements.
async function ask(name, query = {}) {
  const texts = {};
  for (const key of Object.keys(query).sort()) texts[key] = String(query[key]);
  if (embedded) {
    const answer = embedded.answers[JSON.stringify([name, texts])];
    if (answer === undefined) throw new Error("This was left out of the exported file.");
    return answer;
  }
  let response;
  try {
    response = await fetch(`api/${name}?${new URLSearchParams(texts)}`, { headers: { "x-api-key": token } });
  } catch {
    throw new Error("The server does not answer. Is `quadriga view` still running?");
  }
  if (response.status === 401) {
    throw new Error("The address has no token, or one of another server. Use the address that `quadriga view` printed.");
  }
  const type = response.headers.get("content-type") || "";
  const answer = type.startsWith("application/json") ? await response.json() : { error: await response.text() };
  if (!response.ok) throw new Error(answer.error || response.statusText);
  return answer;
}

// An element with attributes, handlers (`onclick`) and children; strings become text.
function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, text] of Object.entries(value)) element.style.setProperty(key, text);
    else if (name in element && typeof value !== "string") element[name] = value;
    else element.setAttribute(name, value);
  }
  return put(element, ...children);
}

// Append children, which may be nested arrays; those that are nothing are left out.
function put(element, ...children) {
  for (const child of children.flat(Infinity)) {
    if (child !== null && child !== undefined && child !== false && child !== "") element.append(child);
  }
  return element;
}

function svg(tag, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

// A number in at most `digits` digits.
function num(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (typeof value === "boolean") return value ? "yes" : "no";
  if (Number.isInteger(value) && Math.abs(value) < 1e9) return value.toLocaleString("en");
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(digits - 1);
  return String(Number(value.toPrecision(size >= 1000 ? digits + 2 : digits)));
}

const percent = (value) => `${num(100 * value)} %`;

function duration(seconds) {
  if (!seconds) return "–";
  if (seconds < 1) return `${num(seconds * 1000)} ms`;
  if (seconds < 100) return `${num(seconds)} s`;
  const minutes = Math.round(seconds / 60);
  if (minutes < 100) return `${minutes} min`;
  return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

const mean = (values) => (values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null);
const isNumber = (value) => typeof value === "number" && Number.isFinite(value);
const note = (text, kind = "") => h("p", { class: `note ${kind}` }, text);
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// Choose among options. Entries are texts or [value, label].
function choice(entries, value, onchange, attributes = {}) {
  const select = h("select", { ...attributes, onchange: () => onchange(select.value) });
  for (const entry of entries) {
    const [key, label] = Array.isArray(entry) ? entry : [entry, entry];
    select.append(h("option", { value: String(key) }, String(label)));
  }
  select.value = String(value);
  return select;
}

const toggle = (label, isOn, onclick, title) =>
  h("button", { type: "button", "aria-pressed": String(isOn), onclick, title }, label);

// The address: #page?key=value. Every choice stands in it, so that it can be sent and reloaded.
function route() {
  const [page, query] = location.hash.slice(1).split("?");
  return { page: page || "runs", query: Object.fromEntries(new URLSearchParams(query || "")) };
}

function address(page, query) {
  const filled = Object.entries(query).filter(([, value]) => value !== "" && value !== null && value !== undefined);
  const text = new URLSearchParams(filled).toString();
  return `#${page}${text ? `?${text}` : ""}`;
}

function go(page, query, isReplaced = false) {
  const hash = address(page, query);
  if (hash === location.hash) return;
  if (isReplaced) {
    history.replaceState(null, "", hash);
    window.dispatchEvent(new HashChangeEvent("hashchange"));
  } else {
    location.hash = hash;
  }
}

// Change entries of the address without leaving the page.
const update = (changes, isReplaced = true) => go(route().page, { ...route().query, ...changes }, isReplaced);

// Says how far the index is, and shows the page again when it is complete.
function indexNote(main, run, { indexed, total }) {
  if (indexed >= total) return "";
  const text = (answer) => `Rollouts are being read: ${num(answer.indexed)} of ${num(answer.total)} files. What follows covers these.`;
  const element = note(text({ indexed, total }));
  const poll = async () => {
    if (!main.isConnected) return;
    try {
      const answer = await ask("progress", { run });
      element.textContent = text(answer);
      if (answer.indexed < answer.total) setTimeout(poll, 700);
      else if (main.isConnected) window.dispatchEvent(new HashChangeEvent("hashchange"));
    } catch (error) {
      element.textContent = error.message;
    }
  };
  setTimeout(poll, 700);
  return element;
}

// The end of a path, which tells it from others.
const tail = (path) => String(path).split("/").slice(-1)[0];

const tip = document.getElementById("tip");

function showTip(text, x, y) {
  tip.textContent = text;
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(4, Math.min(x + 14, innerWidth - box.width - 8))}px`;
  tip.style.top = `${y + 20 + box.height > innerHeight ? Math.max(4, y - box.height - 12) : y + 18}px`;
}

const hideTip = () => {
  tip.hidden = true;
};

async function copy(text, button) {
  const label = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // Without the clipboard of a secure page, such as in a file or on another host.
    const area = h("textarea", {}, text);
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  button.textContent = "copied";
  setTimeout(() => { button.textContent = label; }, 1200);
}

// A small line of values.
function sparkline(values, width = 120, height = 26) {
  const shown = values.filter(isNumber);
  if (shown.length < 2) return h("span", { class: "soft" }, "–");
  const low = Math.min(...shown);
  const range = Math.max(...shown) - low || 1;
  const points = shown.map((value, place) => {
    const x = 2 + (place * (width - 4)) / (shown.length - 1);
    return `${x.toFixed(1)},${(height - 3 - ((value - low) / range) * (height - 6)).toFixed(1)}`;
  });
  const line = svg("polyline", { points: points.join(" "), fill: "none", stroke: "currentColor", "stroke-width": 1.6 });
  return svg("svg", { width, height, class: "spark", role: "img", "aria-label": "curve" }, line);
}

// Keys of the page that is shown, by the character.
const pageKeys = {};

const palette = ["#3b82f6", "#ef7d22", "#1fa971", "#d6409f", "#8b5cf6", "#c9a400", "#0ea5b7", "#e5484d"];
