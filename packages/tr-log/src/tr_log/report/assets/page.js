"use strict";

// Colours of Okabe and Ito, which people with any colour vision tell apart; dashes do it without colour.
const COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b07d00", "#2e8fc7", "#6e6e6e"];
const BRIGHT = ["#56b4e9", "#ff8a3d", "#2cc295", "#e39cc4", "#f0c239", "#8a9bff", "#b5b5b5"];  // on a dark ground
const DASHES = [[], [8, 4], [2, 3], [10, 3, 2, 3], [5, 2], [14, 4], [1, 5]];
const PARTS = {
  start: "#999999", data: "#e69f00", compute: "#0072b2", exchange: "#56b4e9", evaluation: "#009e73",
  checkpoint: "#cc79a7", profile: "#f0e442", other: "#cccccc", redone: "#d55e00", idle: "transparent",
};
// Kinds of marks: the word, the colour, and the shape around (0, 0).
const MARKS = {
  evaluation: { word: "evaluation", colour: "#009e73", shape: "M-4,0 A4,4 0 1 1 4,0 A4,4 0 1 1 -4,0 Z" },
  checkpoint: { word: "checkpoint", colour: "#cc79a7", shape: "M-4,-4 H4 V4 H-4 Z" },
  updates: { word: "skipped or not finite", colour: "#d55e00", shape: "M0,-5 L5,4 H-5 Z" },
};
const GROUPS = [
  ["Speed and memory", /(^|_)(samples|tokens|steps)_per_second$|^(teraflops|mfu|memory|memory_peak)$/],
  ["Evaluation", /^(eval|test)_/],
  ["Training", /./],
];
const WHOLE = [...Array(10).keys()].flatMap((power) => [1, 2, 5].map((digit) => digit * 10 ** power));  // between ticks
const RESTART = "M0,-7 V7";
const darkScheme = window.matchMedia("(prefers-color-scheme: dark)");

let data = JSON.parse(document.getElementById("data").textContent);
let printing = false;
const hidden = new Set();  // paths of runs
const overlaid = new Map();  // name of a curve: that of another one drawn with it
const unfolded = new Map();  // titles of parts, with the run: whether a reader left it open
const plots = new Map();
const byId = (id) => document.getElementById(id);
const colourOf = (index) => (darkScheme.matches && !printing ? BRIGHT : COLOURS)[index % COLOURS.length];
const dashOf = (index) => DASHES[(index + Math.floor(index / COLOURS.length)) % DASHES.length];  // 49 different lines
const ink = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const isHidden = (run) => hidden.has(data.runs[run].path);
// A run may log a number under any name, also one of an object's own methods.
const has = (object, name) => Object.hasOwn(object, name);
const titleOf = (name) => (has(data.words, name) ? data.words[name][0] : name);
const unitOf = (name) => (has(data.words, name) ? data.words[name][1] : "") || titleOf(name);

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

function number(value, digits = 5) {
  if (value === null || value === undefined) return "NaN";
  const size = Math.abs(value);
  if (value !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(digits - 2).replace(/\.?0*e\+?/, "e");
  return String(Number(value.toPrecision(Math.max(digits, Math.ceil(Math.log10(size + 1))))));
}

// Numbers along an axis, with as many digits as tell neighbours apart.
function tickNumbers(plot, ticks, axis, space, increment) {
  const shown = ticks.filter((tick) => tick != null), largest = Math.max(...shown.map(Math.abs));
  if (plot.scales[plot.axes[axis].scale].distr === 3) return ticks.map((tick) => (tick == null ? "" : number(tick)));
  if (largest >= 1e6 || largest < 1e-3) {
    const digits = Math.max(0, Math.ceil(Math.log10(largest / increment) - 1e-9));
    return ticks.map((tick) => (tick === 0 ? "0" : tick.toExponential(digits).replace(/\.?0*e\+?/, "e")));
  }
  const digits = Math.max(0, -Math.floor(Math.log10(increment) + 1e-9));
  return ticks.map((tick) => String(Number(tick.toFixed(digits + 1))));
}

function duration(seconds) {
  if (seconds < 59.95) return seconds.toFixed(seconds < 9.995 ? 2 : 1) + " s";
  const whole = Math.round(seconds), minutes = Math.floor(whole / 60), hours = Math.floor(minutes / 60);
  if (hours >= 48) return `${Math.floor(hours / 24)} d ${hours % 24} h`;
  return hours ? `${hours} h ${minutes % 60} min` : `${minutes} min ${whole % 60} s`;
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
  return axis === "time" ? `${timeUnit()[1]} since the start` : axis;
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

// ---- Curves

// What a plot draws: the curve of each run, and that of a second name in the same plot.
function linesOf(name) {
  const names = overlaid.get(name) ? [name, overlaid.get(name)] : [name];
  return names.flatMap((one, order) => data.runs.flatMap((run, index) =>
    (has(run.curves, one) ? [{ run: index, name: one, second: order === 1 }] : [])));
}

// uPlot wants one rising list of x for all series of a plot.
function tableOf(lines) {
  const share = Number(byId("smoothing").value), tables = [], series = [];
  for (const line of lines) {
    const run = data.runs[line.run], { x, y, mean } = run.curves[line.name], all = risen(run, x, y);
    if (share > 0 || mean) {
      tables.push(all);
      series.push({ ...line, faint: true });
    }
    const [xs, ys] = mean ? risen(run, ...mean) : all;
    tables.push([xs, share > 0 ? smoothed(ys, share) : ys]);
    series.push({ ...line, faint: false });
  }
  return { table: tables.length > 1 ? uPlot.join(tables) : tables[0], series };
}

function risen(run, steps, values) {
  const x = axisValues(run, steps), kept = [];
  x.forEach((value, i) => { if (!kept.length || value > x[kept[kept.length - 1]]) kept.push(i); });
  return [kept.map((i) => x[i]), kept.map((i) => values[i])];
}

// The second curve of a run keeps its colour and dash among several runs, and gets points; alone it gets others.
function styleOf({ run, second }) {
  const index = second && data.runs.length === 1 ? 1 : run;
  return { colour: colourOf(index), dash: dashOf(index), points: second };
}

function seriesOf(one) {
  const { colour, dash, points } = styleOf(one);
  return {
    show: !isHidden(one.run), spanGaps: false, alpha: one.faint ? 0.3 : 1, stroke: colour, dash,
    width: one.faint ? 1 : 1.75, points: { size: 5, fill: colour, ...(points && !one.faint ? { show: true } : {}) },
  };
}

function draw(name, place) {
  const lines = linesOf(name), { table, series } = tableOf(lines), target = place.querySelector(".plot");
  const logarithmic = byId("logarithmic").checked && table.slice(1).every((ys) => ys.every((y) => y == null || y > 0));
  const style = {
    stroke: () => ink("--faint"), grid: { stroke: () => ink("--line"), width: 1 },
    ticks: { stroke: () => ink("--line") }, labelFont: "12px system-ui, sans-serif", font: "12px system-ui, sans-serif",
    labelSize: 18, labelGap: 0,
  };
  const wide = target.clientWidth || 400;
  const options = {
    width: printing ? Math.min(wide, 640) : wide, height: 240, legend: { show: false },
    cursor: { sync: { key: "runs" }, drag: { x: true, y: false }, focus: { prox: 30 } },
    scales: { x: { time: false, range: xRange() }, y: logarithmic ? { distr: 3 } : {} },
    axes: [
      { ...style, label: axisName(), size: 30, ...(byId("axis").value === "step" ? { incrs: WHOLE } : {}) },
      {
        ...style, label: unitOf(name), values: tickNumbers,
        size: (_, ticks) => 24 + 7 * Math.max(2, ...(ticks || []).map((text) => text.length)),
      },
    ],
    series: [{}, ...series.map(seriesOf)],
    hooks: {
      draw: [(plot) => drawMarks(plot, lines)],
      setCursor: [(plot) => say(name)],
      setSelect: [(plot) => {
        if (plot.select.width < 3) return;
        zoom(plot.posToVal(plot.select.left, "x"), plot.posToVal(plot.select.left + plot.select.width, "x"));
      }],
    },
  };
  target.replaceChildren();
  const plot = new uPlot(options, table, target);
  plot.over.addEventListener("dblclick", () => zoom(null, null));
  plots.set(name, { plot, place, series });
  say(name);
}

// All plots show the same range: that of the inputs, or all that the runs which are shown have.
function xRange() {
  const from = byId("from").value, to = byId("to").value;
  const ends = data.runs.filter((run) => !hidden.has(run.path)).flatMap((run) =>
    Object.values(run.curves).flatMap(({ x }) => axisValues(run, [x[0], x.at(-1)])));
  if (!ends.length) ends.push(0, 1);  // all runs are hidden
  const first = from === "" ? Math.min(...ends) : Number(from), last = to === "" ? Math.max(...ends) : Number(to);
  return first < last ? [first, last] : [first - 0.5, first + 0.5];
}

// Restarts are dashed lines from top to bottom; updates that were skipped or not finite are triangles at the bottom.
function drawMarks(plot, lines) {
  const { ctx, bbox } = plot, ratio = devicePixelRatio;
  ctx.save();
  ctx.beginPath();
  ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
  ctx.clip();
  ctx.lineWidth = ratio;
  for (const index of new Set(lines.map((line) => line.run))) {
    if (isHidden(index)) continue;
    const run = data.runs[index], isTime = byId("axis").value === "time" && run.times.length;
    const x = (step, s) => plot.valToPos(isTime ? s / timeUnit()[0] : axisValues(run, [step])[0], "x", true);
    ctx.strokeStyle = data.runs.length > 1 ? colourOf(index) : ink("--faint");
    ctx.setLineDash([3 * ratio, 3 * ratio]);
    for (const session of run.sessions.slice(1)) {
      ctx.beginPath();
      ctx.moveTo(x(session.first, session.from), bbox.top);
      ctx.lineTo(x(session.first, session.from), bbox.top + bbox.height);
      ctx.stroke();
    }
    ctx.fillStyle = MARKS.updates.colour;
    const low = bbox.top + bbox.height, size = 5 * ratio;
    for (const [kind, at, step] of run.sessions.flatMap((session) => session.marks)) {
      if (kind !== "updates") continue;
      ctx.beginPath();
      ctx.moveTo(x(step, at) - size, low);
      ctx.lineTo(x(step, at), low - 1.8 * size);
      ctx.lineTo(x(step, at) + size, low);
      ctx.fill();
    }
  }
  ctx.restore();
}

// Fill the numbers below a plot: the last, lowest and highest, and those at the cursor.
function say(name) {
  if (!plots.has(name)) return;
  const { plot, place, series } = plots.get(name), index = plot.cursor.idx;
  const here = index == null ? null : plot.data[0][index];
  const body = element("tbody"), several = series.length > 1;
  series.forEach((one, i) => {
    if (one.faint || isHidden(one.run)) return;
    const { curves } = data.runs[one.run], values = curves[one.name].y.filter((y) => y !== null);
    const ends = values.length ? [Math.min(...values), Math.max(...values)] : [null, null];
    const cells = [curves[one.name].y.at(-1), ...ends].map((value) => number(value, 4));
    cells.unshift(index == null ? "" : number(nearest(plot.data[i + 1], index), 4));
    const head = element("th", { scope: "row" }, sample(styleOf(one)), several ? lineName(one, overlaid.get(name)) : "");
    body.append(element("tr", {}, head, ...cells.map((text) => element("td", {}, text))));
  });
  const heads = [here === null ? "" : `at ${number(here)}`, "last", "lowest", "highest"];
  const top = element("tr", {}, element("td"), ...heads.map((text) => element("th", { scope: "col" }, text)));
  place.querySelector(".readout").classList.toggle("several", several);
  place.querySelector(".readout").replaceChildren(element("thead", {}, top), body);
}

function lineName({ run, name }, other) {
  return data.runs.length === 1 ? titleOf(name) : data.runs[run].name + (other ? `: ${titleOf(name)}` : "");
}

function nearest(values, index) {
  for (let distance = 0; distance < values.length; distance++) {
    for (const at of [index - distance, index + distance]) if (values[at] !== undefined && at >= 0) return values[at];
  }
}

function zoom(from, to) {
  byId("from").value = from === null ? "" : Number(from.toPrecision(6));
  byId("to").value = to === null ? "" : Number(to.toPrecision(6));
  redraw();
}

function redraw() {
  for (const [name, { plot, place }] of plots) {
    const { left, top } = plot.cursor;
    plot.destroy();
    draw(name, place);
    if (left >= 0) plots.get(name).plot.setCursor({ left, top });
  }
}

// Move through the points of a plot by the keyboard.
function moveCursor(name, event) {
  const { plot } = plots.get(name), xs = plot.data[0], { min, max } = plot.scales.x;
  const first = xs.findIndex((x) => x >= min), last = xs.findLastIndex((x) => x <= max), now = plot.cursor.idx;
  const to = {
    ArrowLeft: now == null ? last : now - 1, ArrowRight: now == null ? first : now + 1, Home: first, End: last,
  }[event.key];
  if (event.key === "Escape") return zoom(null, null);
  if (to === undefined) return;
  event.preventDefault();
  if (first < 0 || last < first) return;  // no point is within the range
  const at = Math.min(Math.max(to, first), last);
  plot.setCursor({ left: plot.valToPos(xs[at], "x"), top: plot.over.clientHeight / 2 });
}

function figureOf(name, names) {
  const others = names.filter((other) => other !== name);
  const choice = element("select", { "aria-label": `Draw another curve with ${titleOf(name)}` });
  choice.append(element("option", { value: "" }, "add a curve"));
  for (const other of others) choice.append(element("option", { value: other }, `with ${titleOf(other)}`));
  choice.value = overlaid.get(name) || "";
  choice.addEventListener("change", () => {
    overlaid.set(name, choice.value);
    const { plot, place } = plots.get(name);
    plot.destroy();
    draw(name, place);
  });
  const plot = element("div", {
    class: "plot", tabindex: "0", role: "img", "aria-label": `Curve of ${titleOf(name)}; arrow keys move through its points`,
  });
  plot.addEventListener("keydown", (event) => moveCursor(name, event));
  const title = element("figcaption", {}, element("span", {}, titleOf(name)), others.length ? choice : "");
  return element("figure", { "data-curve": name }, title, plot, element("table", { class: "readout" }));
}

function groupOf(name) {
  return GROUPS.find(([, pattern]) => pattern.test(name))[0];
}

function showCurves() {
  const section = byId("curves"), all = [...new Set(data.runs.flatMap((run) => Object.keys(run.curves)))];
  const names = all.filter((name) => name !== "memory_peak" || !all.includes("memory"));
  for (const [name, other] of [["loss", "eval_loss"], ["memory", "memory_peak"]]) {
    if (data.runs.length === 1 && all.includes(name) && all.includes(other) && !overlaid.has(name)) overlaid.set(name, other);
  }
  const known = [...plots.keys()].sort().join("\n") === [...names].sort().join("\n") && names.length > 0;
  if (known) return redraw();  // keeps the focus where it is
  for (const { plot } of plots.values()) plot.destroy();
  plots.clear();
  section.replaceChildren();
  document.body.classList.toggle("bare", !names.length);
  if (!names.length) {
    section.append(element("p", { class: "empty" }, data.runs.length ? "Nothing has been logged." : "There is no run here yet."));
  }
  for (const [group] of [...GROUPS].reverse()) {
    const members = names.filter((name) => groupOf(name) === group);
    if (members.length) section.append(element("h2", {}, group));
    for (const name of members) {
      const place = figureOf(name, all);
      section.append(place);
      draw(name, place);
    }
  }
}

function showKey() {
  const runs = data.runs, key = byId("key");
  key.replaceChildren();
  if (runs.some((run) => run.sessions.length > 1)) key.append(element("span", {}, sign(RESTART, "currentColor", "2 2"), "restart"));
  if (runs.some((run) => run.sessions.some((session) => session.marks.some(([kind]) => kind === "updates")))) {
    const { shape, colour, word } = MARKS.updates;
    key.append(element("span", {}, sign(shape, colour), `updates ${word}`));
  }
  if (runs.some((run) => Object.values(run.curves).some(({ mean }) => mean))) {
    key.append(element("span", {}, "Long curves: the faint line has all extremes, the other one means of neighbours."));
  }
}

function sample({ colour, dash, points }) {
  const picture = drawn("svg", { width: 28, height: 12, "aria-hidden": "true" });
  picture.append(drawn("line", { x1: 0, y1: 6, x2: 28, y2: 6, stroke: colour, "stroke-width": 2.5, "stroke-dasharray": dash.join(" ") }));
  if (points) picture.append(drawn("circle", { cx: 14, cy: 6, r: 3.5, fill: colour }));
  return picture;
}

function sign(shape, colour, dash = "") {
  const path = drawn("path", { d: shape, fill: shape === RESTART ? "none" : colour, stroke: colour, "stroke-dasharray": dash });
  return drawn("svg", { width: 14, height: 14, viewBox: "-7 -7 14 14", "aria-hidden": "true" }, path);
}

// ---- Runs, time, tables

function showRuns() {
  const section = byId("runs"), focused = [...section.querySelectorAll(".toggle")].indexOf(document.activeElement);
  section.replaceChildren();
  data.runs.forEach((run, index) => {
    const toggle = element("button", { type: "button", class: "toggle", "aria-pressed": String(!isHidden(index)) });
    toggle.append(sample({ colour: colourOf(index), dash: dashOf(index) }), run.name);
    toggle.addEventListener("click", () => {
      if (!hidden.delete(run.path)) hidden.add(run.path);
      toggle.setAttribute("aria-pressed", String(!isHidden(index)));
      redraw();
    });
    const facts = element("dl");
    for (const [name, value] of run.facts) facts.append(element("div", {}, element("dt", {}, name), element("dd", {}, value)));
    const status = element("span", { class: `status ${run.status}` }, run.status);
    const card = element("div", { class: "run" }, data.runs.length > 1 ? toggle : "", status, facts);
    if (run.error) card.append(element("p", { class: "error" }, run.error));
    section.append(card);
  });
  if (focused >= 0) section.querySelectorAll(".toggle")[focused]?.focus();
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
  const bar = element("div", { class: "bar", "aria-hidden": "true" }), body = element("tbody");
  const idle = run.split.idle || 0, leaves = idle > run.wall / 2, whole = leaves ? run.wall - idle : run.wall;
  const row = (first, seconds, share) => element("tr", {}, first, element("td", { class: "number" }, duration(seconds)),
    element("td", { class: "number" }, share));
  for (const { key, text } of data.parts) {
    const seconds = run.split[key] || 0;
    if (seconds < 0.005) continue;
    const style = `background-color:${PARTS[key]}`, isLeft = leaves && key === "idle";
    if (!isLeft) bar.append(element("span", { class: `part ${key}`, style: `${style};width:${100 * seconds / whole}%`, title: text }));
    const name = element("td", {}, element("span", { class: `swatch part ${key}`, style }), text + (isLeft ? " (not in the bar)" : ""));
    body.append(row(name, seconds, (100 * seconds / run.wall).toFixed(1) + " %"));
  }
  body.append(row(element("th", { scope: "row" }, "in all"), run.wall, ""));
  return element("div", {}, bar, element("div", { class: "scroll" }, element("table", { class: "split" }, body)));
}

// Seconds of a run to a share of its width. Long times between two calls of train are drawn short.
function placesOf(run) {
  const busy = run.sessions.reduce((sum, session) => sum + session.to - session.from, 0);
  const longest = 0.08 * busy, cuts = [];
  let cut = 0;
  run.sessions.slice(1).forEach((session, i) => {
    const before = run.sessions[i].to, gap = session.from - before;
    if (gap > longest && run.wall > 2 * busy) cuts.push([before, session.from, cut += gap - longest]);
  });
  const shown = (run.wall - cut) || 1;
  const place = (s) => {
    const passed = cuts.filter(([, until]) => until <= s).at(-1);
    return 100 * (s - (passed ? passed[2] : 0)) / shown;
  };
  return { place, isCut: cuts.length > 0 };
}

function timeline(run) {
  const { place, isCut } = placesOf(run), percent = (s) => `${place(s).toFixed(3)}%`;
  const lanes = { evaluation: 7, checkpoint: 43, updates: 59 }, events = [], kinds = new Set();
  const picture = drawn("svg", { class: "timeline", "aria-hidden": "true" });
  for (const [order, session] of run.sessions.entries()) {
    const width = Math.max(place(session.to) - place(session.from), 0.2);
    const what = order ? "restarted" : "started";
    events.push([session.from, `${what} at step ${session.first}`], [session.to, `${session.status} at step ${session.last}`]);
    const text = `steps ${session.first} to ${session.last}: ${session.status} after ${duration(session.to - session.from)}`;
    const box = drawn("rect", { x: percent(session.from), y: 16, width: `${width}%`, height: 18, class: `session ${session.status}` });
    box.append(drawn("title", {}, text));
    picture.append(box);
    if (order) {
      const at = percent(session.from);
      picture.append(drawn("line", { x1: at, x2: at, y1: 0, y2: "100%", stroke: "currentColor", "stroke-dasharray": "2 2" }));
    }
    for (const [kind, at, step, said] of session.marks) {
      const { shape, colour, word } = MARKS[kind], words = `${said ? "updates " + said : word} (step ${step})`;
      const path = drawn("path", { d: shape, fill: colour, class: "mark" }, drawn("title", {}, `${words}, ${duration(at)}`));
      picture.append(drawn("svg", { x: percent(at), y: lanes[kind], class: "at" }, path));
      events.push([at, words]);
      kinds.add(kind);
    }
  }
  picture.style.height = `${kinds.has("updates") ? 68 : kinds.has("checkpoint") ? 50 : 38}px`;
  const ticks = isCut ? [0, run.wall] : [0, 0.25, 0.5, 0.75, 1].map((share) => share * run.wall);
  const ends = element("p", { class: "ends" }, ...ticks.map((s) => element("span", {}, duration(s))));
  const key = element("p", { class: "key" }, ...Object.entries(MARKS).filter(([kind]) => kinds.has(kind)).map(([kind, { shape, colour, word }]) =>
    element("span", {}, sign(shape, colour), kind === "updates" ? `updates ${word}` : word)));
  if (run.sessions.length > 1) key.append(element("span", {}, sign(RESTART, "currentColor", "2 2"), "restart"));
  if (isCut) key.append(element("span", {}, "long times between two calls of train are drawn short"));
  const rows = events.sort((one, other) => one[0] - other[0]).map(([at, words]) => [duration(at), words]);
  return element("div", { class: "when" }, picture, ends, key, folded(run, `What happened when (${rows.length})`, table(rows, ["time", "event"])));
}

function table(rows, heads) {
  const made = element("table"), body = element("tbody");
  if (heads) made.append(element("thead", {}, element("tr", {}, ...heads.map((text) => element("th", { scope: "col" }, text)))));
  for (const [first, ...rest] of rows) {
    body.append(element("tr", {}, element("th", { scope: "row" }, String(first)), ...rest.map((cell) => element("td", {}, String(cell)))));
  }
  made.append(body);
  return element("div", { class: rows.length > 20 ? "scroll tall" : "scroll", ...(rows.length > 20 ? { tabindex: "0" } : {}) }, made);
}

function showTables() {
  const section = byId("tables");
  section.replaceChildren();
  if (data.differences.length) {
    section.append(element("h2", {}, "Arguments that differ"), table(data.differences, ["argument", ...data.runs.map((run) => run.name)]));
  }
  for (const run of data.runs) {
    section.append(element("h2", {}, data.runs.length > 1 ? run.name : "Details"));
    if (run.warnings.length) section.append(folded(run, `Warnings (${run.warnings.length})`, table(run.warnings, ["first at", "times", "level", "text"]), true));
    const chosen = run.arguments.filter(([, , origin]) => origin), heads = ["argument", "value", "set by"];
    if (chosen.length) section.append(folded(run, `Arguments that were set (${chosen.length})`, table(chosen, heads), data.runs.length === 1));
    const all = run.arguments.map(([name, value, origin]) => [name, value, origin || "default"]);
    if (all.length) section.append(folded(run, `All arguments (${all.length})`, table(all, heads)));
    for (const profile of run.profiles) section.append(folded(run, `Dearest operators of ${profile.steps}`, profileOf(profile), true));
    if (run.machine.length) section.append(folded(run, "Machine and versions", table(run.machine)));
    if (run.files.length) section.append(folded(run, `Files (${run.files.length})`, links(run.files)));
    section.append(element("p", { class: "empty" }, run.path));
  }
}

function links(files) {
  return element("ul", {}, ...files.map(([name, address]) => element("li", {}, address ? element("a", { href: address }, name) : name)));
}

function profileOf({ heads, rows, files }) {
  const note = "Time of its own, without that of operators which it calls. ui.perfetto.dev opens the trace, " +
    "docs.pytorch.org/memory_viz the snapshot of memory. Recorded steps are slower than others.";
  const made = element("div", { class: "numbers" }, rows.length ? table(rows, heads) : "", element("p", { class: "empty" }, note));
  if (files.length) made.append(links(files));
  return made;
}

// A live page makes its parts anew, and leaves open what a reader opened.
function folded(run, title, content, open = false) {
  const made = element("details", {}, element("summary", {}, title), content);
  const key = `${title.replace(/ \(\d+\)$/, "")} ${run.path}`;
  made.open = unfolded.has(key) ? unfolded.get(key) : open;
  made.querySelector("summary").addEventListener("click", () => unfolded.set(key, !made.open));
  return made;
}

// ---- Start

function show() {
  const now = data.runs.length === 1 ? data.runs[0].name : data.runs.length ? `${data.runs.length} runs` : "no run yet";
  if (LIVE) document.title = document.querySelector("h1").textContent = now;
  byId("made").textContent = (LIVE ? "live, last news " : "made ") + data.made;
  const axes = byId("axis").options;
  axes[1].disabled = !data.runs.some((run) => run.epochs.length);
  axes[2].disabled = !data.runs.some((run) => run.times.length);
  showRuns();
  showKey();
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
darkScheme.addEventListener("change", () => { showRuns(); redraw(); });
for (const [event, now] of [["beforeprint", true], ["afterprint", false]]) {
  window.addEventListener(event, () => { printing = now; showRuns(); redraw(); });
}
show();
if (LIVE) {
  const source = new EventSource("events");
  let isHeld = false, news = null;
  const take = () => {
    if (isHeld || news === null) return;  // a curve that is drawn anew would end the drag
    data = JSON.parse(news);
    news = null;
    const top = window.scrollY;
    show();
    window.scrollTo(0, top);
  };
  source.onmessage = (event) => { news = event.data; take(); };
  for (const [kind, now] of [["pointerdown", true], ["pointerup", false], ["pointercancel", false]]) {
    window.addEventListener(kind, () => { isHeld = now; setTimeout(take); });
  }
  source.onerror = () => { byId("made").textContent = `not connected; last news ${data.made}`; };
}
