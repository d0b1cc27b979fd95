"use strict";
// Draws what the page's data holds: numbers, notes, tables, bars, and charts over steps.
const page = JSON.parse(document.getElementById("data").textContent);
const charts = [];
// What draws a chart once its box has a width.
const undrawn = [];
const compact = new Intl.NumberFormat("en", {notation: "compact", maximumSignificantDigits: 4});
const percent = new Intl.NumberFormat("en", {style: "percent"});

// An element that contains texts, which are never markup, and other elements.
function element(tag, classes, ...inside) {
  const made = document.createElement(tag);
  made.className = classes;
  made.append(...inside);
  return made;
}

// A colour of page.html's styles, which depends on whether the browser is dark.
function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
}

function filled(width, colourName) {
  const made = element("i", "");
  made.style.width = 100 * width + "%";
  made.style.background = `var(--${colourName})`;
  return made;
}

function table({columns, rows}) {
  // A number in a cell is a part of a whole, drawn as a bar.
  const cell = value => typeof value === "number" ? element("div", "track", filled(value, "blue")) : value;
  const row = (tag, cells) => element("tr", "", ...cells.map((each, i) => element(tag, columns[i][1], each)));
  const heads = row("th", columns.map(([title]) => title));
  return element("table", "", heads, ...rows.map(each => row("td", each.map(cell))));
}

function bar(parts) {
  const whole = parts.reduce((sum, [, seconds]) => sum + seconds, 0) || 1;
  const ms = seconds => compact.format(1e3 * seconds) + " ms";
  const keys = parts.map(([name, seconds, colourName]) => {
    const key = element("span", "key", name + " ", element("b", "", ms(seconds)));
    key.append(", " + percent.format(seconds / whole));
    key.style.setProperty("--c", `var(--${colourName})`);
    return key;
  });
  const drawn = parts.map(([, seconds, colourName]) => filled(seconds / whole, colourName));
  return element("div", "", element("div", "bar", ...drawn), ...keys);
}

// The index of a line's value at a step, or next to it: lines have values at different steps.
function nearest(plot, line, index, step) {
  const steps = plot.data[0], values = plot.data[line];
  if (line === 0 || values[index] != null) return index;
  let before = index, after = index;
  while (before >= 0 && values[before] == null) before--;
  while (after < values.length && values[after] == null) after++;
  if (before < 0 || after === values.length) return Math.max(before, after % values.length);
  return step - steps[before] <= steps[after] - step ? before : after;
}

function drawMarks(plot) {
  const {ctx, bbox} = plot;
  ctx.save();
  ctx.strokeStyle = colour("soft");
  ctx.setLineDash([4, 4]);
  for (const step of page.marks) {
    const x = plot.valToPos(step, "x", true);
    if (x < bbox.left || x > bbox.left + bbox.width) continue;
    ctx.beginPath();
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
  }
  ctx.restore();
}

function chart({lines, from_zero: fromZero}) {
  const box = element("div", "chart");
  const axis = {
    stroke: () => colour("soft"),
    grid: {stroke: () => colour("line"), width: 1},
    ticks: {stroke: () => colour("line"), width: 1},
    values: (plot, values) => values.map(value => compact.format(value)),
  };
  // Away from the pointer, a legend shows a line's last value.
  const shown = last => (plot, value, line, index) => compact.format(index == null ? last : value);
  const colourOf = (plot, line) => `var(--${lines[line - 1].colour})`;
  const options = {
    height: 210,
    scales: {
      x: {time: false},
      y: {range: (plot, low, high) => uPlot.rangeNum(fromZero ? Math.min(0, low) : low, high, 0.1, true)},
    },
    axes: [{...axis, size: 32}, {...axis, size: 60}],
    cursor: {y: false, sync: {key: "steps"}, dataIdx: nearest, points: {fill: colourOf}},
    legend: {markers: {stroke: colourOf}},
    hooks: {draw: [drawMarks]},
    series: [
      {label: "step", value: (plot, step, line, index) => Math.round(index == null ? page.last : step).toLocaleString("en")},
      ...lines.map(line => ({
        label: line.name,
        stroke: () => colour(line.colour),
        width: line.faint ? 1.3 : 1.8,
        alpha: line.faint ? 0.55 : 1,
        points: {fill: () => colour("card")},
        value: shown(line.values.at(-1)),
      })),
    ],
  };
  undrawn.push(() => {
    // The page's first and last step make the range of steps the same in all charts.
    const data = uPlot.join([[[page.first, page.last]], ...lines.map(line => [line.steps, line.values])]);
    const plot = new uPlot({...options, width: box.clientWidth}, data, box);
    charts.push(plot);
    new ResizeObserver(() => plot.setSize({width: box.clientWidth, height: options.height})).observe(box);
  });
  return box;
}

function card(content) {
  const wide = content.parts || (content.columns && !content.title);
  const made = element("div", wide ? "card wide" : "card");
  if (content.title) made.append(element("h3", "", content.title));
  if (content.lines) made.append(chart(content));
  if (content.parts) made.append(bar(content.parts));
  if (content.columns) made.append(table(content));
  if (content.text) made.append(element("p", "", content.text));
  return made;
}

const main = document.querySelector("main");
main.append(element("h1", "", page.title), ...page.about.map(line => element("p", "", line)));
const numbers = page.numbers.map(
  ([value, what]) => element("div", "card", element("b", "", value), element("span", "", what)));
if (numbers.length) main.append(element("div", "row", ...numbers));
if (page.notes.length) main.append(element("div", "card note", ...page.notes.map(line => element("p", "", line))));
for (const {title, cards} of page.sections) {
  main.append(element("h2", "", title), element("div", "charts", ...cards.map(card)));
}
for (const draw of undrawn) draw();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => charts.forEach(plot => plot.redraw()));
