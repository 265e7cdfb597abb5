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
  ["Machine", /^(memory|memory_peak|ram|cpu|cpu_of_process|gpu)$/],
  ["Speed", /(^|_)(samples|tokens|steps)_per_second$|^(teraflops|mfu)$/],
  ["Evaluation", /^(eval|test|predict)_/],
  ["Training", /./],
];
const WHOLE = [...Array(10).keys()].flatMap((power) => [1, 2, 5].map((digit) => digit * 10 ** power));  // between ticks
const RESTART = "M0,-7 V7";
const MOST_ROWS = 6;
const darkScheme = window.matchMedia("(prefers-color-scheme: dark)");

let data = JSON.parse(document.getElementById("data").textContent);
let printing = false;
const hidden = new Set(), pinned = new Set();  // paths of runs
let order = null;  // of the table: a column, and whether it falls
let detailed = "";  // path of the run whose details are shown
let rows = [];  // of the table: runs by number, as they are ordered, and the group of each
const overlaid = new Map();  // name of a curve: that of another one drawn with it
const stepOf = new Map();  // run and title of what is drawn: the step that a reader chose
const unfolded = new Map();  // titles of parts, with the run: whether a reader left it open
const plots = new Map();
const byId = (id) => document.getElementById(id);
const colourOf = (index) => (darkScheme.matches && !printing ? BRIGHT : COLOURS)[index % COLOURS.length];
const dashOf = (index) => DASHES[(index + Math.floor(index / COLOURS.length)) % DASHES.length];  // 49 different lines
const ink = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const several = () => data.runs.length > 1;
const isHidden = (run) => hidden.has(data.runs[run].path) || (several() && !rows.some(([index]) => index === run));
// Runs of a group have one colour.
const lineOf = (run) => (byId("group").value === "" ? run : rows.find(([index]) => index === run)?.[1] ?? 0);
// A run may log a number under any name, also one of an object's own methods.
const has = (object, name) => Object.hasOwn(object, name);
const titleOf = (name) => (has(data.words, name) ? data.words[name][0] : name);
const unitOf = (name) => (has(data.words, name) ? data.words[name][1] : "");

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

// What numbers of this size are divided by, and the letter for it.
function scaleOf(size) {
  const known = [[1e12, 1e12, "T"], [1e9, 1e9, "G"], [1e6, 1e6, "M"], [1e4, 1e3, "k"]];
  return (known.find(([least]) => size >= least) || [0, 1, ""]).slice(1);
}

function number(value, digits = 5) {
  if (value === null || value === undefined || value === "NaN") return "NaN";
  const size = Math.abs(value);
  if (value !== 0 && (size < 1e-3 || size >= 1e15)) return value.toExponential(digits - 2).replace(/\.?0*e\+?/, "e");
  const [factor, sign] = scaleOf(size);
  return String(Number((value / factor).toPrecision(digits))) + sign;
}

// Numbers along an axis, with as many digits as tell neighbours apart.
function tickNumbers(plot, ticks, axis, space, increment) {
  const shown = ticks.filter((tick) => tick != null), largest = Math.max(...shown.map(Math.abs));
  if (plot.scales[plot.axes[axis].scale].distr === 3) return ticks.map((tick) => (tick == null ? "" : number(tick)));
  if (largest >= 1e15 || largest < 1e-3) {
    const digits = Math.max(0, Math.ceil(Math.log10(largest / increment) - 1e-9));
    return ticks.map((tick) => (tick === 0 ? "0" : tick.toExponential(digits).replace(/\.?0*e\+?/, "e")));
  }
  const [factor, sign] = scaleOf(largest), digits = Math.max(0, -Math.floor(Math.log10(increment / factor) + 1e-9));
  return ticks.map((tick) => String(Number((tick / factor).toFixed(digits + 1))) + (tick ? sign : ""));
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
  const index = second && !several() ? 1 : lineOf(run);
  return { colour: colourOf(index), dash: dashOf(index), points: second };
}

function seriesOf(one) {
  const { colour, dash, points } = styleOf(one);
  return {
    show: !isHidden(one.run), spanGaps: false, alpha: one.faint ? 0.3 : 1, stroke: colour, dash,
    width: one.faint ? 1 : pinned.has(data.runs[one.run].path) ? 3.5 : 1.75, points: { size: 5, fill: colour, ...(points && !one.faint ? { show: true } : {}) },
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
    width: printing ? Math.min(wide, 640) : wide, height: several() ? 170 : 240, legend: { show: false },
    cursor: { sync: { key: "runs" }, drag: { x: true, y: false }, focus: { prox: 30 } },
    scales: { x: { time: false, range: xRange() }, y: logarithmic ? { distr: 3 } : {} },
    axes: [
      { ...style, label: axisName(), size: 30, ...(byId("axis").value === "step" ? { incrs: WHOLE } : {}) },
      {
        ...style, ...(unitOf(name) ? { label: unitOf(name) } : {}), values: tickNumbers,
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
  const ends = data.runs.filter((_, index) => !isHidden(index)).flatMap((run) =>
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
    ctx.strokeStyle = several() ? colourOf(lineOf(index)) : ink("--faint");
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

// Fill the numbers below a plot: the last, lowest and highest, and those at the cursor. Of very many curves, those that
// are nearest to the cursor have a row, or the first ones of the table.
function say(name) {
  if (!plots.has(name)) return;
  const { plot, place, series } = plots.get(name), { idx: index, top } = plot.cursor;
  const here = index == null ? null : plot.data[0][index];
  const known = series.map((one, i) => ({ one, at: index == null ? null : nearest(plot.data[i + 1], index) }))
    .filter(({ one }) => !one.faint && !isHidden(one.run));
  const distance = ({ one, at }) => (index == null || known.length <= MOST_ROWS ? rows.findIndex(([run]) => run === one.run)
    : at == null ? Infinity : Math.abs(plot.valToPos(at, "y") - top));
  known.sort((one, other) => distance(one) - distance(other));
  const body = element("tbody"), isNamed = known.length > 1;
  for (const { one, at } of known.slice(0, MOST_ROWS)) {
    const { curves } = data.runs[one.run], values = curves[one.name].y.filter((y) => y !== null);
    const ends = values.length ? [Math.min(...values), Math.max(...values)] : [null, null];
    const cells = [curves[one.name].y.at(-1), ...ends].map((value) => number(value, 4));
    cells.unshift(index == null ? "" : number(at, 4));
    const names = isNamed ? [sample(styleOf(one)), ending(lineName(one, overlaid.get(name)))] : [];
    body.append(element("tr", {}, element("th", { scope: "row" }, ...names), ...cells.map((text) => element("td", {}, text))));
  }
  const left = known.length - MOST_ROWS;
  const said = here === null ? "" : `at ${Number.isInteger(here) ? here : number(here)}`;
  const heads = element("tr", {}, element("td", {}, left > 0 ? `and ${left} more` : ""),
    ...[said, "last", "lowest", "highest"].map((text) => element("th", { scope: "col" }, text)));
  place.querySelector(".readout").classList.toggle("several", isNamed);
  place.querySelector(".readout").replaceChildren(element("thead", {}, heads), body);
}

// A name of which, where there is no room, the end is seen: names of runs often begin alike.
const ending = (name) => element("span", { class: "ending" }, element("bdi", {}, name));

function lineName({ run, name }, other) {
  return !several() ? titleOf(name) : data.runs[run].name + (other ? `: ${titleOf(name)}` : "");
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
  for (const [kind, save, what] of [["PNG", savePicture, "the picture"], ["CSV", saveNumbers, "the points that are drawn"]]) {
    const button = element("button", { type: "button", title: `Save ${what}`, "aria-label": `${kind} of ${titleOf(name)}` }, kind);
    button.addEventListener("click", () => save(name));
    title.append(button);
  }
  return element("figure", { "data-curve": name }, title, plot, element("table", { class: "readout" }));
}

function download(name, blob) {
  const link = element("a", { download: name.replace(/[^\w.-]/g, "_"), href: URL.createObjectURL(blob) });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60000);
}

function saveNumbers(name) {
  const quoted = (text) => `"${text.replaceAll('"', '""')}"`, lines = ["run,curve,step,value"];
  for (const { run, name: curve } of linesOf(name).filter((line) => !isHidden(line.run))) {
    const { x, y } = data.runs[run].curves[curve];
    x.forEach((step, i) => lines.push([quoted(data.runs[run].name), quoted(curve), step, y[i] ?? "NaN"].join(",")));
  }
  download(`${name}.csv`, new Blob([lines.join("\n") + "\n"], { type: "text/csv" }));
}

// The plot, with its title above and the names of its lines below.
function savePicture(name) {
  const { plot, series } = plots.get(name), from = plot.ctx.canvas, ratio = devicePixelRatio, high = 20 * ratio;
  const lines = series.filter((one) => !one.faint && !isHidden(one.run)), named = lines.length > 1 ? lines : [];
  const picture = element("canvas", { width: from.width, height: from.height + high * (named.length + 2) });
  const ctx = picture.getContext("2d");
  ctx.fillStyle = ink("--ground");
  ctx.fillRect(0, 0, picture.width, picture.height);
  ctx.fillStyle = ink("--ink");
  ctx.font = `600 ${14 * ratio}px system-ui, sans-serif`;
  ctx.fillText(titleOf(name), high / 2, high);
  ctx.drawImage(from, 0, high * 1.5);
  ctx.font = `${12 * ratio}px system-ui, sans-serif`;
  named.forEach((one, i) => {
    const { colour, dash } = styleOf(one), y = from.height + high * (i + 2);
    Object.assign(ctx, { strokeStyle: colour, lineWidth: 2 * ratio });
    ctx.setLineDash(dash.map((length) => length * ratio));
    ctx.beginPath();
    ctx.moveTo(high / 2, y);
    ctx.lineTo(2 * high, y);
    ctx.stroke();
    ctx.fillText(lineName(one, overlaid.get(name)), 2.4 * high, y + high / 5);
  });
  picture.toBlob((blob) => download(`${name}.png`, blob));
}

function groupOf(name) {
  return GROUPS.find(([, pattern]) => pattern.test(name))[0];
}

function showCurves() {
  const section = byId("curves"), all = [...new Set(data.runs.flatMap((run) => Object.keys(run.curves)))];
  const pairs = [["memory", "memory_peak"], ["cpu", "cpu_of_process"]];
  const isBeside = (name) => pairs.some(([first, second]) => second === name && all.includes(first)) || (name === "ram" && several());
  const names = all.filter((name) => !isBeside(name));
  for (const [name, other] of [["loss", "eval_loss"], ...pairs]) {
    if (!several() && all.includes(name) && all.includes(other) && !overlaid.has(name)) overlaid.set(name, other);
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
  const section = byId("runs"), buttons = () => [...section.querySelectorAll("button")];
  const focused = buttons().indexOf(document.activeElement), left = section.querySelector(".scroll")?.scrollLeft;
  byId("choice").hidden = !several();
  document.body.classList.toggle("several", several());
  arrange();
  section.replaceChildren(...(several() ? [tableOfRuns(), partsKey(), ...coordinates()] : data.runs.map(cardOf)));
  for (const run of data.runs) {
    if (run.error) section.append(element("p", { class: "error" }, several() ? `${run.name}: ${run.error}` : run.error));
  }
  if (focused >= 0) buttons()[focused]?.focus();
  if (left) section.querySelector(".scroll").scrollLeft = left;
}

function cardOf(run) {
  const results = element("dl", { class: "results" }), facts = element("dl");
  for (const [name, value, more] of run.results) {
    results.append(element("div", {}, element("dt", {}, name), element("dd", {}, value, element("small", {}, ` ${more}`))));
  }
  for (const [name, value] of run.facts) {
    const wide = name === "command" || name === "weights from" ? { class: "wide" } : {};
    facts.append(element("div", wide, element("dt", {}, name), element("dd", {}, value)));
  }
  const status = element("span", { class: `status ${run.status}` }, run.status);
  return element("div", { class: "run" }, status, element("div", { class: "came-to" }, results, courseOf(run)), facts);
}

function courseOf(run) {
  const picture = small(run, 0, 260, 56);
  return picture && element("div", {}, picture, element("small", {}, titleOf(run.objective)));
}

// The curve that says how a run went, as small as a word.
function small(run, index, width, height) {
  const curve = has(run.curves, run.objective) ? run.curves[run.objective] : { x: [], y: [] };
  const points = curve.x.map((x, i) => [x, curve.y[i]]).filter(([x, y], i) => y !== null && (!i || x > curve.x[i - 1]));
  if (points.length < 2) return "";
  const xs = points.map(([x]) => x), ys = points.map(([, y]) => y), low = Math.min(...ys), high = Math.max(...ys);
  const place = ([x, y]) => `${(width - 4) * (x - xs[0]) / (xs.at(-1) - xs[0] || 1) + 2},` +
    `${height - 3 - (height - 6) * (y - low) / (high - low || 1)}`;
  const picture = drawn("svg", { class: "small", width, height, viewBox: `0 0 ${width} ${height}`, role: "img" });
  const title = drawn("title", {}, `${titleOf(run.objective)}, ${number(ys[0], 4)} to ${number(ys.at(-1), 4)}`);
  picture.append(title, drawn("polyline", { points: points.map(place).join(" "), fill: "none", stroke: colourOf(index), "stroke-width": 1.5 }));
  return picture;
}

function cellText(column, value) {
  if (value === null || value === undefined) return "";
  if (column.kind === "seconds") return duration(value);
  return column.kind === "result" && typeof value === "number" ? number(value, 4) : String(value);
}

const bestColumn = () => data.columns.findIndex(({ greater }) => greater !== undefined);
const sorting = () => order || [bestColumn(), data.columns[bestColumn()]?.greater];

// Put the runs that the filter leaves in the order of the table: those that are pinned first, then group by group.
function arrange() {
  if (!several()) return;
  const { runs, columns } = data, [by, falls] = sorting(), group = byId("group");
  const chosen = group.value, offered = columns.filter(({ kind }) => kind === "argument" || kind === "state");
  group.replaceChildren(element("option", { value: "" }, "nothing"), ...offered.map(({ title }) => element("option", {}, title)));
  group.value = offered.some(({ title }) => title === chosen) ? chosen : "";
  const grouped = columns.findIndex(({ title }) => title === group.value);
  const asked = byId("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
  const text = (run) => [run.name, ...columns.map((column, i) => `${column.title}=${cellText(column, run.row[i])}`)].join(" ").toLowerCase();
  const compare = (one, other) => {
    if (one === other) return 0;
    if (one === null || other === null) return one === null ? 1 : -1;
    const sign = falls ? -1 : 1;
    if (typeof one === "number" && typeof other === "number") return sign * (one - other);
    return sign * String(one).localeCompare(String(other), undefined, { numeric: true });
  };
  const isPinned = (index) => pinned.has(runs[index].path);
  const key = (index) => (by === -2 ? runs[index].name : by >= 0 ? runs[index].row[by] : index);
  const groups = grouped < 0 ? [] : [...new Set(runs.map((run) => run.row[grouped]))];
  groups.sort((one, other) => String(one).localeCompare(String(other), undefined, { numeric: true }));
  if (groups.every((value) => typeof value === "number")) groups.sort((one, other) => one - other);
  rows = runs.map((run, index) => [index, grouped < 0 ? null : groups.indexOf(run.row[grouped])])
    .filter(([index]) => isPinned(index) || asked.every((word) => text(runs[index]).includes(word)));
  rows.sort(([one, inGroup], [other, inOther]) => isPinned(other) - isPinned(one) || inGroup - inOther
    || compare(key(one), key(other)) || one - other);
  byId("count").textContent = `${rows.length} of ${runs.length} runs`;
}

function tableOfRuns() {
  const { columns, runs } = data, body = element("tbody"), grouped = columns.findIndex(({ title }) => title === byId("group").value);
  const best = bestColumn(), [by, falls] = sorting();
  const head = (title, at, kind = "") => {
    const button = element("button", { type: "button" }, ...title.split(/(?<=_)/).flatMap((part) => [part, element("wbr")]));
    button.addEventListener("click", () => { order = [at, by === at ? !falls : kind === "result"]; showRuns(); redraw(); });
    return element("th", { scope: "col", "aria-sort": by === at ? (falls ? "descending" : "ascending") : "none" }, button);
  };
  const heads = [head("run", -2), ...columns.map(({ title, kind }, i) => head(title, i, kind))];
  const [course, time] = ["course", "time"].map((text) => element("th", { scope: "col" }, text));
  heads.splice(columns.findIndex(({ kind }) => kind === "state") + 2, 0, time);
  heads.splice(1, 0, course);
  let before = null;
  for (const [index, group] of rows) {
    if (group !== null && group !== before && !pinned.has(runs[index].path)) {
      before = group;
      const members = rows.filter(([, other]) => other === group).map(([member]) => runs[member].row);
      const values = members.map((row) => row[best]).filter((value) => typeof value === "number");
      const mean = values.reduce((sum, value) => sum + value, 0) / values.length;
      const found = values.length ? `, ${columns[best].title} ${number(mean, 4)} on average, ${number(Math.min(...values), 4)} to ${number(Math.max(...values), 4)}` : "";
      const words = `${columns[grouped].title} ${cellText(columns[grouped], runs[index].row[grouped])}: ${members.length} run${members.length > 1 ? "s" : ""}${found}`;
      body.append(element("tr", { class: "group" }, element("th", { scope: "rowgroup", colspan: heads.length }, words)));
    }
    body.append(rowOf(index));
  }
  return element("div", { class: "scroll" }, element("table", { class: "of-runs" }, element("thead", {}, element("tr", {}, ...heads)), body));
}

function switchOf(label, set, run, isOn, ...content) {
  const button = element("button", { type: "button", class: "toggle", "aria-label": label, "aria-pressed": String(isOn) }, ...content);
  button.addEventListener("click", () => {
    if (!set.delete(run.path)) set.add(run.path);
    showRuns();
    redraw();
  });
  return button;
}

function rowOf(index) {
  const run = data.runs[index], isPinned = pinned.has(run.path), style = { colour: colourOf(lineOf(index)), dash: dashOf(lineOf(index)) };
  const shown = switchOf(`Show ${run.name}`, hidden, run, !hidden.has(run.path), sample(style), ending(run.name));
  shown.title = run.path;
  shown.classList.add("name");
  const pin = switchOf(`Pin ${run.name}`, pinned, run, isPinned, isPinned ? "★" : "☆");
  pin.classList.add("pin");
  const warned = run.warnings.length ? [element("span", { class: "hint", title: "see its details" }, ` ${run.warnings.length} warnings`)] : [];
  const cells = data.columns.map((column, i) => {
    if (column.kind === "state") return element("td", {}, element("span", { class: `status ${run.status}` }, run.status), ...warned);
    return element("td", typeof run.row[i] === "number" ? { class: "number" } : {}, cellText(column, run.row[i]));
  });
  const parts = data.parts.filter(({ key }) => run.split[key] >= 0.005);
  const words = parts.map(({ key, text }) => `${text} ${(100 * run.split[key] / run.wall).toFixed(0)} %`).join(", ");
  const time = parts.length ? element("div", { class: "bar", role: "img", "aria-label": words, title: words }, ...barOf(run).children) : "";
  cells.splice(data.columns.findIndex(({ kind }) => kind === "state") + 1, 0, element("td", {}, time));
  const course = element("td", {}, small(run, lineOf(index), 80, 18));
  return element("tr", { "data-run": run.name }, element("th", { scope: "row" }, pin, shown), course, ...cells);
}

// Where a value is on an axis, 0 to 1, and the values that are written there.
function scaleOfAxis(values) {
  const known = [...new Set(values)];
  if (!known.every((value) => typeof value === "number")) {
    known.sort((one, other) => String(one).localeCompare(String(other), undefined, { numeric: true }));
    return { place: (value) => (known.indexOf(value) + 0.5) / known.length, ticks: known.slice(0, 12) };
  }
  const low = Math.min(...known), high = Math.max(...known), on = low > 0 && high >= 20 * low ? Math.log : (value) => value;
  const place = (value) => (high > low ? (on(value) - on(low)) / (on(high) - on(low)) : 0.5);
  return { place, ticks: known.length <= 6 ? known : [low, high] };
}

// Of a search: a line for each run through its arguments to its result; the better, the stronger.
function coordinates() {
  const { columns, runs } = data, best = bestColumn();
  const axes = columns.map((_, i) => i).filter((i) => columns[i].kind === "argument").slice(0, 8);
  const shown = rows.map(([index]) => runs[index]).filter((run) => typeof run.row[best] === "number" && !hidden.has(run.path));
  if (shown.length < 8 || axes.length < 2) return [];
  axes.push(best);
  shown.sort((one, other) => (columns[best].greater ? 1 : -1) * (one.row[best] - other.row[best]));
  const scales = axes.map((column) => scaleOfAxis(shown.map((run) => run.row[column]))), gap = 880 / (axes.length - 1);
  const most = Math.floor(gap / 6.5), named = (title) => (title.length > most ? "…" + title.slice(1 - most) : title);
  const x = (i) => 50 + gap * i, y = (i, value) => 165 - 140 * scales[i].place(value);
  const picture = drawn("svg", { class: "coordinates", viewBox: "0 0 1000 175", role: "img", "aria-label": "A line for each run through its arguments to its result" });
  shown.forEach((run, rank) => {
    const points = axes.map((column, i) => `${x(i)},${y(i, run.row[column])}`).join(" ");
    const words = axes.map((column) => `${columns[column].title} ${cellText(columns[column], run.row[column])}`).join(", ");
    picture.append(drawn("polyline", { points, "stroke-opacity": 0.1 + 0.9 * ((rank + 1) / shown.length) ** 2 }, drawn("title", {}, `${run.name}: ${words}`)));
  });
  axes.forEach((column, i) => {
    picture.append(drawn("line", { x1: x(i), x2: x(i), y1: 20, y2: 170 }), 
      drawn("text", { x: x(i), y: 10, class: "axis", "text-anchor": i ? (i < axes.length - 1 ? "middle" : "end") : "start" }, named(columns[column].title)));
    for (const value of scales[i].ticks) picture.append(drawn("text", { x: x(i) + 4, y: y(i, value) + 3 }, cellText(columns[column], value)));
  });
  return [element("p", { class: "key" }, "A line for each run, from its arguments to its result; the strongest lines are those of the best runs."),
    element("div", { class: "scroll", tabindex: "0" }, picture)];
}

function partsKey() {
  const used = data.parts.filter(({ key }) => key !== "idle" && data.runs.some((run) => run.split[key] >= 0.005));
  return element("p", { class: "key" }, ...used.map(({ key, text }) =>
    element("span", {}, element("span", { class: `swatch part ${key}`, style: `background-color:${PARTS[key]}` }), text)));
}

// Of several runs the details of one are shown, which a reader chooses.
const detailedRun = () => data.runs.find((run) => run.path === detailed) || data.runs[several() && rows.length ? rows[0][0] : 0];

function showDetails() {
  const section = byId("time"), run = detailedRun(), isFocused = document.activeElement?.id === "detailed";
  section.replaceChildren();
  if (several()) {
    const choice = element("select", { id: "detailed", "aria-label": "Run whose details are shown" });
    choice.append(...data.runs.map(({ path, name }) => element("option", { value: path }, name)));
    choice.value = run.path;
    choice.addEventListener("change", () => { detailed = choice.value; showDetails(); });
    section.append(element("h2", {}, "Details of ", choice));
    if (isFocused) choice.focus();
    if (run.drawings.length) section.append(folded(run, "Predictions", drawingsOf(run)));
    if (run.sessions.length) section.append(folded(run, "Where the time went", element("div", {}, timeline(run), splitOf(run))));
  } else if (run?.sessions.length) {
    if (run.drawings.length) section.append(element("h2", {}, "Predictions"), drawingsOf(run));
    section.append(element("h2", {}, "Where the time went"), timeline(run), splitOf(run));
  }
  showTables(run);
}

function barOf({ split, wall }) {
  const bar = element("div", { class: "bar", "aria-hidden": "true" }), idle = split.idle || 0;
  const whole = idle > wall / 2 ? wall - idle : wall;
  for (const { key, text } of data.parts) {
    const seconds = split[key] || 0;
    if (seconds < 0.005 || (key === "idle" && whole < wall)) continue;
    bar.append(element("span", { class: `part ${key}`, style: `background-color:${PARTS[key]};width:${100 * seconds / whole}%`, title: text }));
  }
  return bar;
}

function splitOf(run) {
  const body = element("tbody"), leaves = (run.split.idle || 0) > run.wall / 2;
  const row = (first, seconds, share) => element("tr", {}, first, element("td", { class: "number" }, duration(seconds)),
    element("td", { class: "number" }, share));
  for (const { key, text } of data.parts) {
    const seconds = run.split[key] || 0;
    if (seconds < 0.005) continue;
    const swatch = element("span", { class: `swatch part ${key}`, style: `background-color:${PARTS[key]}` });
    const name = element("td", {}, swatch, text + (leaves && key === "idle" ? " (not in the bar)" : ""));
    body.append(row(name, seconds, (100 * seconds / run.wall).toFixed(1) + " %"));
  }
  body.append(row(element("th", { scope: "row" }, "total"), run.wall, ""));
  const table = element("div", { class: "scroll" }, element("table", { class: "split" }, body));
  return element("div", {}, barOf(run), table, ...(run.processes.length ? [processesOf(run)] : []));
}

function processesOf(run) {
  const sum = (split) => Object.values(split).reduce((all, seconds) => all + seconds, 0);
  const wall = Math.max(...run.processes.map(({ split }) => sum(split)));
  const parts = data.parts.filter(({ key }) => run.processes.some(({ split }) => split[key] >= 0.005));
  const cell = (seconds) => element("td", { class: "number" }, seconds >= 0.005 ? duration(seconds) : "");
  const rows = run.processes.map(({ name, split }) => element("tr", {}, element("th", { scope: "row" }, name),
    element("td", {}, barOf({ split, wall })), ...parts.map(({ key }) => cell(split[key] || 0))));
  const head = ["process", "its time", ...parts.map(({ text }) => text)].map((text) => element("th", { scope: "col" }, text));
  const table = element("table", { class: "processes" }, element("thead", {}, element("tr", {}, ...head)), element("tbody", {}, ...rows));
  return folded(run, `By process (${run.processes.length})`, element("div", { class: "scroll" }, table));
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

function table(rows, heads, most = 20) {
  const made = element("table"), body = element("tbody");
  if (heads) made.append(element("thead", {}, element("tr", {}, ...heads.map((text) => element("th", { scope: "col" }, text)))));
  for (const [first, ...rest] of rows) {
    body.append(element("tr", {}, element("th", { scope: "row" }, String(first)), ...rest.map((cell) => element("td", {}, String(cell)))));
  }
  made.append(body);
  return element("div", { class: rows.length > most ? "scroll tall" : "scroll", ...(rows.length > most ? { tabindex: "0" } : {}) }, made);
}

function showTables(run) {
  const section = byId("tables");
  section.replaceChildren();
  if (!run) return;
  if (!several()) section.append(element("h2", {}, "Details"));
  if (run.warnings.length) section.append(folded(run, `Warnings (${run.warnings.length})`, table(run.warnings, ["first at", "times", "level", "text"]), true));
  const known = [...run.arguments, ...data.arguments], chosen = known.filter(([, , origin]) => origin);
  const heads = ["argument", "value", "set by"], all = known.map(([name, value, origin]) => [name, value, origin || "default"]);
  if (chosen.length) section.append(folded(run, `Arguments that were set (${chosen.length})`, table(chosen, heads), !several()));
  if (all.length) section.append(folded(run, `All arguments (${all.length})`, table(all, heads)));
  for (const profile of run.profiles) section.append(folded(run, `Dearest operators of ${profile.steps}`, profileOf(profile), true));
  const machine = [...(several() ? run.facts : []), ...run.machine];
  if (machine.length) section.append(folded(run, "Machine and versions", table(machine)));
  if (run.files.length) section.append(folded(run, `Files (${run.files.length})`, links(run.files)));
  section.append(element("p", { class: "empty" }, run.path));
}

// What was logged to be drawn, of the newest step, or of one that is chosen.
function drawingsOf(run) {
  return element("div", { class: "drawings" }, ...run.drawings.map(({ title, drawn }) => {
    const key = `${title} ${run.path}`, place = element("div"), choice = element("select", { "aria-label": `Step of ${title}` });
    choice.append(...drawn.map(({ step }, i) => element("option", { value: i }, `step ${step}`)));
    choice.value = Math.max(drawn.findIndex(({ step }) => step === stepOf.get(key)), 0);
    const show = () => {
      const one = drawn[choice.value];
      place.replaceChildren(...(one.kind === "matrix" ? matrixOf(one) : samplesOf(one)));
    };
    choice.addEventListener("change", () => { stepOf.set(key, drawn[choice.value].step); show(); });
    if (drawn.length) show(); else place.append("There is no room for it on this page; events.jsonl has it.");
    const of = drawn.length > 1 ? choice : element("small", {}, drawn.length ? `step ${drawn[0].step}` : "");
    return element("figure", {}, element("figcaption", {}, element("span", {}, title), of), place);
  }));
}

const noted = (text) => element("p", { class: "empty" }, text);

function samplesOf({ columns, rows, of }) {
  const made = table(rows, columns, 12);
  for (const cell of made.querySelectorAll("tbody *")) cell.classList.toggle("long", cell.textContent.length > 40);
  return [made, of > rows.length ? noted(`the first ${rows.length} of ${of} rows`) : ""];
}

// A row for each true class: what is right in blue, what is wrong in red, the stronger the greater its share of the row;
// a wrong one is seen from a small share on.
function matrixOf({ names, counts }) {
  const wide = names.length > 15, kind = wide ? "matrix upright wide" : names.length > 5 ? "matrix upright" : "matrix", share = (part, whole) => (whole ? `${(100 * part / whole).toFixed(0)} %` : "");
  const sum = (values) => values.reduce((all, value) => all + value, 0), columns = names.map((_, i) => sum(counts.map((row) => row[i])));
  const head = (text, scope) => element("th", { scope, title: text }, element("span", {}, text));
  const body = element("tbody");
  counts.forEach((row, i) => {
    const all = sum(row), cells = row.map((count, j) => {
      const part = all ? count / all : 0, strength = i === j ? part : Math.sqrt(part), colour = i === j ? "0, 114, 178" : "176, 74, 0";
      const words = `${names[i]}, predicted as ${names[j]}: ${count}, ${share(count, all)} of ${names[i]}`;
      const style = `background-color: rgba(${colour}, ${strength.toFixed(3)})${strength > 0.55 ? "; color: #fff" : ""}`;
      return element("td", { style, title: words, ...(wide ? { "aria-label": words } : {}) }, wide || !count ? "" : number(count, 4));
    });
    body.append(element("tr", {}, head(names[i], "row"), ...cells, element("td", {}, share(row[i], all))));
  });
  const precision = columns.map((all, i) => element("td", {}, share(counts[i][i], all)));
  if (!wide) body.append(element("tr", { class: "told" }, head("precision", "row"), ...precision, element("td")));
  const heads = element("tr", {}, element("td"), ...names.map((name) => head(name, "col")), head("recall", "col"));
  const made = element("table", { class: kind }, element("thead", {}, heads), body);
  return [element("div", { class: "scroll", tabindex: "0" }, made), noted("a row for each true class, a column for each predicted one")];
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
  showDetails();
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
for (const [id, event] of [["filter", "input"], ["group", "change"]]) {
  byId(id).addEventListener(event, () => { showRuns(); redraw(); });
}
byId("choice").addEventListener("submit", (event) => event.preventDefault());
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
