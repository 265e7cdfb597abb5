"use strict";

// Colours of Okabe and Ito, which people with any colour vision tell apart; dashes do it without colour.
const COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#999999"];
const BRIGHT = ["#56b4e9", "#ff8a3d", "#2cc295", "#e39cc4", "#f0c239", "#8a9bff", "#b5b5b5"];  // on a dark ground
const DARK = window.matchMedia("(prefers-color-scheme: dark)");
const DASHES = [[], [8, 4], [2, 3], [10, 3, 2, 3], [4, 4], [14, 4], [1, 5]];
const PARTS = {
  start: "#999999", data: "#e69f00", compute: "#0072b2", exchange: "#56b4e9", evaluation: "#009e73",
  checkpoint: "#cc79a7", other: "#cccccc", redone: "#d55e00", idle: "transparent",
};
const UNITS = { steps_per_second: "steps a second" };
const WORDS = { grad_norm: "gradient norm", learning_rate: "learning rate", steps_per_second: "speed" };

let data = JSON.parse(document.getElementById("data").textContent);
const hidden = new Set();
const plots = new Map();
const byId = (id) => document.getElementById(id);
const colourOf = (index) => (DARK.matches ? BRIGHT : COLOURS)[index % COLOURS.length];
const ink = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

function drawn(tag, attributes, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

function number(value) {
  if (value === null || value === undefined) return "not a number";
  const size = Math.abs(value);
  if (value !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(3).replace(/\.?0+e/, "e");
  return String(Number(value.toPrecision(5)));
}

function duration(seconds) {
  if (seconds < 60) return seconds.toFixed(seconds < 10 ? 2 : 1) + " s";
  const minutes = Math.floor(seconds / 60), rest = Math.round(seconds % 60);
  if (minutes < 60) return `${minutes} min ${rest} s`;
  return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

// Values between the points of `pairs`, which rise: [[step, value], ...]
function interpolated(pairs, step) {
  if (!pairs.length) return null;
  let low = 0, high = pairs.length - 1;
  if (step <= pairs[0][0]) return pairs[0][1];
  if (step >= pairs[high][0]) return pairs[high][1];
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (pairs[middle][0] <= step) low = middle; else high = middle;
  }
  const [x0, y0] = pairs[low], [x1, y1] = pairs[high];
  return y0 + (y1 - y0) * (step - x0) / (x1 - x0);
}

function axisValues(run, steps) {
  const axis = byId("axis").value;
  if (axis === "step") return steps;
  const pairs = axis === "epoch" ? run.epochs : run.times.map(([step, s]) => [step, s / timeUnit()[0]]);
  return pairs.length ? steps.map((step) => interpolated(pairs, step)) : steps;
}

function timeUnit() {
  const longest = Math.max(...data.runs.map((run) => run.wall));
  return longest < 180 ? [1, "seconds"] : longest < 3 * 3600 ? [60, "minutes"] : [3600, "hours"];
}

function axisName() {
  const axis = byId("axis").value;
  return axis === "time" ? timeUnit()[1] : axis;
}

// An exponential mean that starts without a bias; what is not a number stays so.
function smoothed(values, share) {
  let mean = 0, weight = 0;
  return values.map((value) => {
    if (value === null) return null;
    mean = share * mean + (1 - share) * value;
    weight = share * weight + (1 - share);
    return mean / weight;
  });
}

// uPlot wants one rising list of x for all series of a plot.
function tableOf(name) {
  const share = Number(byId("smoothing").value), tables = [], series = [];
  data.runs.forEach((run, index) => {
    const curve = run.curves[name];
    if (!curve) return;
    const x = axisValues(run, curve.x), order = rising(x);
    const xs = order.map((i) => x[i]), ys = order.map((i) => curve.y[i]);
    if (share > 0) {
      tables.push([xs, ys]);
      series.push({ run: index, faint: true });
      tables.push([xs, smoothed(ys, share)]);
    } else tables.push([xs, ys]);
    series.push({ run: index, faint: false });
  });
  return { table: tables.length > 1 ? uPlot.join(tables) : tables[0], series };
}

function rising(x) {
  const kept = [];
  x.forEach((value, i) => { if (!kept.length || value > x[kept[kept.length - 1]]) kept.push(i); });
  return kept;
}

function seriesOf({ run, faint }) {
  const colour = colourOf(run);
  return {
    label: data.runs[run].name, show: !hidden.has(run), spanGaps: false, alpha: faint ? 0.3 : 1,
    stroke: colour, width: faint ? 1 : 1.75, dash: DASHES[run % DASHES.length], value: (_, v) => number(v),
    points: { size: 5, fill: colour },
  };
}

function draw(name, place) {
  const { table, series } = tableOf(name);
  const readout = place.querySelector(".readout");
  const logarithmic = byId("logarithmic").checked && table.slice(1).every((ys) => ys.every((y) => y == null || y > 0));
  const style = { stroke: () => ink("--faint"), grid: { stroke: () => ink("--line"), width: 1 }, ticks: { stroke: () => ink("--line") } };
  const options = {
    width: place.querySelector(".plot").clientWidth || 400, height: 240,
    legend: { show: false }, cursor: { sync: { key: "runs" }, drag: { x: true, y: false } },
    scales: { x: { time: false, range: window.xRange }, y: logarithmic ? { distr: 3 } : {} },
    axes: [
      { ...style, label: axisName(), size: 30, labelSize: 20, labelGap: 0, labelFont: "12px system-ui" },
      { ...style, size: 64, values: (_, ticks) => ticks.map((t) => (t == null ? "" : number(t))) },
    ],
    series: [{}, ...series.map(seriesOf)],
    hooks: {
      setCursor: [(plot) => say(readout, plot, series)],
      setSelect: [(plot) => {
        if (plot.select.width < 3) return;
        zoom(plot.posToVal(plot.select.left, "x"), plot.posToVal(plot.select.left + plot.select.width, "x"));
      }],
    },
  };
  const target = place.querySelector(".plot");
  target.replaceChildren();
  const plot = new uPlot(options, table, target);
  plot.over.addEventListener("dblclick", () => zoom(null, null));
  plots.set(name, { plot, place });
  summarise(readout, name);
}

window.xRange = (plot, low, high) => {
  const from = byId("from").value, to = byId("to").value;
  const first = from === "" ? low : Number(from), last = to === "" ? high : Number(to);
  return first < last ? [first, last] : [first - 0.5, first + 0.5];
};

function say(readout, plot, series) {
  const index = plot.cursor.idx;
  if (index == null) return summarise(readout, readout.dataset.name);
  const x = plot.data[0][index], parts = [];
  series.forEach(({ run, faint }, i) => {
    if (faint || hidden.has(run)) return;
    const value = nearest(plot.data[i + 1], index);
    if (value !== undefined) parts.push((data.runs.length > 1 ? data.runs[run].name + " " : "") + number(value));
  });
  readout.textContent = `${axisName()} ${number(x)}: ${parts.join(", ")}`;
}

function nearest(values, index) {
  for (let distance = 0; distance < values.length; distance++) {
    for (const at of [index - distance, index + distance]) if (values[at] !== undefined && at >= 0) return values[at];
  }
}

function summarise(readout, name) {
  readout.textContent = data.runs.filter((run, index) => run.curves[name] && !hidden.has(index)).map((run) => {
    const values = run.curves[name].y.filter((y) => y !== null);
    const text = values.length
      ? `last ${number(values[values.length - 1])}, lowest ${number(Math.min(...values))}, highest ${number(Math.max(...values))}`
      : "never a number";
    return (data.runs.length > 1 ? run.name + ": " : "") + text;
  }).join("; ");
}

function zoom(from, to) {
  byId("from").value = from === null ? "" : Number(from.toPrecision(6));
  byId("to").value = to === null ? "" : Number(to.toPrecision(6));
  redraw();
}

function redraw() {
  for (const [name, { plot, place }] of plots) {
    plot.destroy();
    draw(name, place);
  }
}

function showCurves() {
  const names = [...new Set(data.runs.flatMap((run) => Object.keys(run.curves)))];
  const section = byId("curves");
  for (const { plot } of plots.values()) plot.destroy();
  plots.clear();
  section.replaceChildren();
  if (!names.length) section.append(element("p", { class: "empty" }, "Nothing has been logged yet."));
  for (const name of names) {
    const readout = element("div", { class: "readout", "data-name": name, "aria-live": "off" });
    const title = element("figcaption", {}, WORDS[name] || name, UNITS[name] ? ` (${UNITS[name]})` : "");
    const place = element("figure", { "data-curve": name }, title, element("div", { class: "plot" }), readout);
    section.append(place);
    draw(name, place);
  }
}

function sample(index) {
  const line = drawn("line", {
    x1: 0, y1: 6, x2: 28, y2: 6, stroke: colourOf(index), "stroke-width": 3, "stroke-dasharray": DASHES[index % DASHES.length].join(" "),
  });
  return drawn("svg", { width: 28, height: 12, "aria-hidden": "true" }, line);
}

function showRuns() {
  const section = byId("runs");
  section.replaceChildren();
  data.runs.forEach((run, index) => {
    const toggle = element("button", { type: "button", class: "toggle", "aria-pressed": String(!hidden.has(index)) });
    toggle.append(sample(index), run.name);
    toggle.addEventListener("click", () => {
      if (hidden.has(index)) hidden.delete(index); else hidden.add(index);
      toggle.setAttribute("aria-pressed", String(!hidden.has(index)));
      redraw();
    });
    const facts = element("dl");
    for (const [name, value] of run.facts) facts.append(element("div", {}, element("dt", {}, name), element("dd", {}, value)));
    const card = element("div", { class: "run" }, toggle, element("span", { class: "status" }, run.status), facts);
    if (run.error) card.append(element("p", { class: "error" }, run.error));
    section.append(card);
  });
}

function showTime() {
  const section = byId("time"), known = data.runs.filter((run) => run.sessions.length);
  section.replaceChildren();
  if (!known.length) return;
  section.append(element("h2", {}, "Where the time went"));
  for (const run of known) {
    if (data.runs.length > 1) section.append(element("h3", {}, run.name));
    section.append(timeline(run), splitOf(run));
  }
}

function splitOf(run) {
  const bar = element("div", { class: "bar", "aria-hidden": "true" });
  const body = element("tbody");
  for (const { key, text } of data.parts) {
    const seconds = run.split[key] || 0;
    if (seconds <= 0) continue;
    const piece = element("span", { style: `width:${100 * seconds / run.wall}%;background:${PARTS[key]}`, title: text });
    bar.append(piece);
    const swatch = element("span", { class: "swatch", style: `background:${PARTS[key]}` });
    body.append(element("tr", {}, element("td", {}, swatch, text), element("td", { class: "number" }, duration(seconds)),
      element("td", { class: "number" }, (100 * seconds / run.wall).toFixed(1) + " %")));
  }
  body.append(element("tr", {}, element("th", {}, "in all"), element("td", { class: "number" }, duration(run.wall)), element("td")));
  return element("div", {}, bar, element("div", { class: "scroll" }, element("table", { class: "split" }, body)));
}

function timeline(run) {
  const width = 1000, x = (s) => width * s / (run.wall || 1), list = element("ul", { class: "sessions" });
  const picture = drawn("svg", { viewBox: `0 0 ${width} 40`, preserveAspectRatio: "none", class: "timeline", "aria-hidden": "true" });
  for (const session of run.sessions) {
    const box = drawn("rect", { x: x(session.from), y: 10, width: Math.max(x(session.to) - x(session.from), 2), height: 20, fill: "#0072b2", opacity: 0.35 });
    const text = `steps ${session.first} to ${session.last}: ${session.status} after ${duration(session.to - session.from)}`;
    box.append(drawn("title", {}, text));
    picture.append(box);
    list.append(element("li", {}, text));
    for (const [kind, at, step] of session.marks) {
      const saved = kind === "checkpoint";
      const mark = drawn("line", {
        x1: x(at), x2: x(at), y1: saved ? 30 : 0, y2: saved ? 40 : 10, stroke: saved ? "#cc79a7" : "#009e73",
        "stroke-width": 2, "vector-effect": "non-scaling-stroke",
      });
      mark.append(drawn("title", {}, `${kind} at step ${step}, ${duration(at)}`));
      picture.append(mark);
    }
  }
  const ends = element("p", { class: "ends" }, element("span", {}, "0"), element("span", {}, "evaluations above, checkpoints below"), element("span", {}, duration(run.wall)));
  return element("div", {}, picture, ends, run.sessions.length > 1 ? list : "");
}

function table(rows, heads) {
  const made = element("table");
  if (heads) made.append(element("thead", {}, element("tr", {}, ...heads.map((text) => element("th", { scope: "col" }, text)))));
  const body = element("tbody");
  for (const row of rows) {
    const [first, ...rest] = row;
    body.append(element("tr", {}, element("th", { scope: "row" }, String(first)), ...rest.map((cell) => element("td", {}, cell instanceof Node ? cell : String(cell)))));
  }
  made.append(body);
  return element("div", { class: "scroll" }, made);
}

function showTables() {
  const section = byId("tables");
  section.replaceChildren();
  if (data.differences.length) {
    section.append(element("h2", {}, "Arguments that differ"), table(data.differences, ["argument", ...data.runs.map((run) => run.name)]));
  }
  for (const run of data.runs) {
    section.append(element("h2", {}, data.runs.length > 1 ? run.name : "Details"));
    if (run.warnings.length) section.append(folded(`Warnings (${run.warnings.length})`, table(run.warnings, ["time", "level", "text"]), true));
    const set = new Set(run.changed), all = Object.entries(run.arguments).map(([name, value]) => [name, value, set.has(name) ? "set" : "default"]);
    const chosen = all.filter((row) => row[2] === "set");
    if (chosen.length) section.append(folded(`Arguments that were set (${chosen.length})`, table(chosen, ["argument", "value", "origin"]), true));
    if (all.length) section.append(folded(`All arguments (${all.length})`, table(all, ["argument", "value", "origin"])));
    if (run.machine.length) section.append(folded("Machine and versions", table(run.machine)));
    const links = run.files.map(([name, address]) => (address ? element("a", { href: address }, name) : name));
    if (links.length) section.append(folded(`Files (${links.length})`, listOf(links)));
    section.append(element("p", { class: "empty" }, run.path));
  }
}

function listOf(links) {
  const made = element("ul");
  for (const link of links) made.append(element("li", {}, link));
  return made;
}

function folded(title, content, open = false) {
  const made = element("details", {}, element("summary", {}, title), content);
  made.open = open;
  return made;
}

function show() {
  byId("made").textContent = (LIVE ? "live, last news " : "made ") + data.made;
  const axes = byId("axis").options;
  axes[1].disabled = !data.runs.some((run) => run.epochs.length);
  axes[2].disabled = !data.runs.some((run) => run.times.length);
  showRuns();
  showCurves();
  showTime();
  showTables();
}

for (const id of ["axis", "logarithmic", "from", "to"]) {
  byId(id).addEventListener("change", () => {
    if (id === "axis") { byId("from").value = ""; byId("to").value = ""; }
    redraw();
  });
}
byId("smoothing").addEventListener("input", () => {
  byId("smoothing-value").textContent = byId("smoothing").value;
  redraw();
});
byId("all").addEventListener("click", () => zoom(null, null));
byId("controls").addEventListener("submit", (event) => event.preventDefault());
let resized;
window.addEventListener("resize", () => { clearTimeout(resized); resized = setTimeout(redraw, 150); });
DARK.addEventListener("change", () => { showRuns(); redraw(); });
show();
if (LIVE) {
  const source = new EventSource("events");
  source.onmessage = (event) => {
    data = JSON.parse(event.data);
    const open = [...document.querySelectorAll("details")].map((one) => one.open), top = window.scrollY;
    show();
    document.querySelectorAll("details").forEach((one, i) => { if (i < open.length) one.open = open[i]; });
    window.scrollTo(0, top);
  };
}
