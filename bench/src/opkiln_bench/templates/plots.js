// Two plots a family: roofline (arithmetic intensity against rate) and the ratios in order.
// Drawn at most as wide as shown, so that text of 12 px is never less than 11 on the screen.
const HEIGHT = 290, LEFT = 46, RIGHT = 10, TOP = 10, BOTTOM = 36;
let WIDTH = 480;

function shape(tag, attributes, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

// Logarithmic position of a value between two bounds, on a line from `from` to `to`.
const logScale = (low, high, from, to) => (v) => from + ((to - from) * Math.log(v / low)) / Math.log(high / low);
const onX = (low, high) => logScale(low, high, LEFT, WIDTH - RIGHT);
const onY = (low, high) => logScale(low, high, HEIGHT - BOTTOM, TOP);

// Powers of ten; below two decades 2 and 5 of each too.
function ticks(low, high, steps = high / low < 100 ? [1, 2, 5] : [1]) {
  const found = [];
  for (let decade = Math.floor(Math.log10(low)); decade <= Math.log10(high); decade++)
    for (const step of steps) {
      const tick = step * 10 ** decade;
      if (tick >= low * 0.999 && tick <= high * 1.001) found.push(tick);
    }
  return found;
}

function frame(title, xTitle, yTitle) {
  const svg = shape("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": title });
  svg.append(
    shape("text", { x: (WIDTH + LEFT) / 2, y: HEIGHT - 6, "text-anchor": "middle" }, xTitle),
    shape("text", { x: -HEIGHT / 2, y: 12, transform: "rotate(-90)", "text-anchor": "middle" }, yTitle),
  );
  return svg;
}

function gridX(svg, x, values) {
  for (const v of values)
    svg.append(
      shape("line", { class: "grid", x1: x(v), x2: x(v), y1: TOP, y2: HEIGHT - BOTTOM }),
      shape("text", { x: x(v), y: HEIGHT - BOTTOM + 14, "text-anchor": "middle" }, digits(v, 2)),
    );
}

function gridY(svg, y, values) {
  for (const v of values)
    svg.append(
      shape("line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: y(v), y2: y(v) }),
      shape("text", { x: LEFT - 4, y: y(v) + 4, "text-anchor": "end" }, digits(v, 2)),
    );
}

// Form and colour both carry the verdict.
function mark(row, x, y, text) {
  const forms = {
    ahead: `M${x},${y - 5}l5,8h-10z`,
    behind: `M${x},${y + 5}l5,-8h-10z`,
    level: `M${x - 4},${y}a4,4 0 1 0 8,0a4,4 0 1 0 -8,0z`,
  };
  const path = shape("path", { d: forms[row.verdict] || forms.level, class: "mark" });
  path.append(shape("title", {}, `${row.op} ${row.label} ${row.dtype}: ${text}`));
  return shape("g", { class: row.verdict }, path);
}

const roofName = (x, y, anchor, text) => shape("text", { class: "roof-name", x, y: Math.max(y - 4, TOP + 10), "text-anchor": anchor }, text);

function roofline(title, rows) {
  const points = rows.filter((r) => r.tflops && r.bytes).map((r) => [r, r.flops / r.bytes, r.tflops]);
  if (!points.length) return null;
  const xs = points.map((p) => p[1]), ys = points.map((p) => p[2]);
  const roofs = Object.entries(meta.peaks_tflops).filter(([name]) => points.some(([r]) => r.peak === name));
  const low = Math.min(...xs) / 2, high = Math.max(...xs) * 2;
  const limit = (i, peak) => Math.min(peak, (i * meta.bandwidth_gbps) / 1e3);
  const tops = roofs.map(([, peak]) => limit(high, peak));
  const bottom = Math.min(...ys) / 2, top = Math.max(...ys, ...tops) * 2;
  const x = onX(low, high), y = onY(bottom, top);
  const svg = frame(`Roofline of ${title}`, "operations per byte", "TFLOP/s");
  gridX(svg, x, ticks(low, high));
  gridY(svg, y, ticks(bottom, top));
  for (const [name, peak] of roofs) {
    const knee = (peak * 1e3) / meta.bandwidth_gbps;
    const path = [low, ...(knee > low && knee < high ? [knee] : []), high].map((i) => `${x(i)},${y(limit(i, peak))}`);
    svg.append(shape("polyline", { class: "roof", points: path.join(" ") }, shape("title", {}, name)));
    if (knee < high) svg.append(roofName(WIDTH - RIGHT - 4, y(peak), "end", `${name.replace("_", " ")} ${digits(peak, 3)}`));
  }
  // the slope that all roofs share, where a part of it is in the plot: named left of its middle
  const knees = roofs.map(([, peak]) => (peak * 1e3) / meta.bandwidth_gbps);
  const start = Math.max(low, (bottom * 1e3) / meta.bandwidth_gbps), end = Math.min(high, Math.max(...knees, 0));
  if (start < end) {
    const middle = Math.sqrt(start * end);
    svg.append(roofName(Math.max(x(middle) - 6, LEFT + 66), y((middle * meta.bandwidth_gbps) / 1e3), "end", `${digits(meta.bandwidth_gbps / 1e3, 3)} TB/s`));
  }
  for (const [row, i, rate] of points) svg.append(mark(row, x(i), y(rate), `${digits(rate, 3)} TFLOP/s, SOL ${percent(row.sol)}`));
  return figure(svg, meta.bandwidth_gbps ? "Roofline: rate against operations per byte; lines are the device's limits" : "Rate against operations per byte");
}

function ratios(title, rows) {
  const points = rows.filter((r) => r.ratio).sort((a, b) => a.ratio - b.ratio);
  if (!points.length) return null;
  const low = Math.min(0.8, points[0].lo), high = Math.max(1.25, ...points.map((r) => r.hi)) * 1.05;
  const x = (i) => LEFT + ((WIDTH - LEFT - RIGHT) * (i + 0.5)) / points.length, y = onY(low, high);
  const svg = frame(`Ratios of ${title}`, "rows, by ratio", "best other / ours");
  const span = high / low;
  gridY(svg, y, ticks(low, high, span > 30 ? [1] : span > 5 ? [1, 2, 5] : [1, 1.2, 1.5, 2, 3, 8, 9]));
  svg.append(shape("line", { class: "roof", x1: LEFT, x2: WIDTH - RIGHT, y1: y(1), y2: y(1) }));
  points.forEach((row, i) => {
    const whisker = shape("line", { class: "whisker", x1: x(i), x2: x(i), y1: y(row.lo), y2: y(row.hi) });
    const point = mark(row, x(i), y(row.ratio), `${row.ratio.toFixed(2)}×`);
    point.prepend(whisker);
    svg.append(point);
  });
  return figure(svg, "Ratio of every row with its 95 % interval; above the line ours is faster");
}

function figure(svg, caption) {
  return element("figure", {}, svg, element("figcaption", {}, caption));
}

function drawPlots(chosen) {
  WIDTH = Math.min(480, innerWidth - 40);
  const sections = [...new Set(chosen.map((r) => r.family))].map((family) => {
    const title = meta.headings[family] || family;
    const own = chosen.filter((r) => r.family === family);
    const plots = [roofline(title, own), ratios(title, own)].filter(Boolean);
    return plots.length ? element("section", { "data-family": family }, element("h2", {}, title), element("div", { class: "plots" }, ...plots)) : "";
  });
  byId("plots").replaceChildren(...sections);
}
