"use strict";
// The state of the page is its address: #q=rms&verdict=behind&sort=ratio&dir=desc&theme=dark
const { meta, rows } = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);
const state = new URLSearchParams(location.hash.slice(1));
// alone: nothing else was timed; bad: ours is wrong, failed or missing
const VERDICTS = ["ahead", "level", "behind", "alone", "bad"];
const GLYPHS = { ahead: "▲", level: "●", behind: "▼", alone: "–", bad: "✕" };
const TITLES = { alone: "no other", bad: "no result" };

const digits = (v, n) => (v == null ? "–" : Number(v.toPrecision(n)).toString());
const percent = (v) => (v == null ? "–" : Math.round(100 * v) + " %");
const time = (us) => (us == null ? "–" : us.toFixed(us >= 100 ? 0 : us >= 10 ? 1 : 2));
const best = (r) => r.alternatives[0] || [null, null];
const ratioText = (r) => (r.ratio ? `${GLYPHS[r.verdict]} ${r.ratio.toFixed(2)}×` : r.status === "ok" ? "–" : r.status);
// key, heading, value to sort by, text, number?, hidden on a phone?
const COLUMNS = [
  ["op", "Op", (r) => r.op, (r) => r.op],
  ["label", "Workload", (r) => r.label, (r) => r.label + (r.throttled ? " ⚠ throttled" : "")],
  ["dtype", "dtype", (r) => r.dtype, (r) => r.dtype, 0, 1],
  ["ratio", "Ratio", (r) => r.ratio, ratioText, 1],
  ["ours", "Ours µs", (r) => r.ours_us, (r) => time(r.ours_us), 1],
  ["best", "Best other", (r) => best(r)[0], (r) => best(r)[0] || "–", 0, 1],
  ["best_us", "its µs", (r) => best(r)[1], (r) => time(best(r)[1]), 1, 1],
  ["tflops", "TFLOP/s", (r) => r.tflops, (r) => digits(r.tflops, 3), 1, 1],
  ["sol", "SOL", (r) => r.sol, (r) => percent(r.sol), 1, 1],
  ["floor", "Floor", (r) => r.share_of_floor, (r) => percent(r.share_of_floor), 1, 1],
  ["bound", "Bound", (r) => r.bound, (r) => r.bound || "–", 0, 1],
  ["regret", "Regret", (r) => r.regret, (r) => (r.regret == null ? "–" : (100 * r.regret).toFixed(1) + " %"), 1, 1],
];

function element(tag, attributes, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

function change(name, value) {
  if (value) state.set(name, value);
  else state.delete(name);
  history.replaceState(null, "", "#" + state);
  draw();
}

function wanted(row) {
  const words = (state.get("q") || "").toLowerCase().split(/\s+/);
  return (
    words.every((word) => row.haystack.includes(word)) &&
    ["family", "op", "dtype", "verdict"].every((k) => !state.get(k) || row[k] === state.get(k))
  );
}

function sorted(chosen) {
  const column = COLUMNS.find(([key]) => key === state.get("sort"));
  if (!column) return chosen;
  const sign = state.get("dir") === "desc" ? -1 : 1;
  const value = column[2];
  return [...chosen].sort((a, b) => {
    const [x, y] = [value(a), value(b)];
    if (x == null || y == null) return (x == null) - (y == null); // what is absent comes last
    return sign * (typeof x === "string" ? x.localeCompare(y) : x - y);
  });
}

function details(row) {
  const lines = [["opkiln", row.ours_us], ...row.alternatives];
  const table = element("table", {});
  for (const [name, us] of lines.filter(([, us]) => us != null).sort((a, b) => a[1] - b[1]))
    table.append(element("tr", {}, element("td", {}, name), element("td", { class: "num" }, time(us) + " µs")));
  for (const [name, reason] of row.unusable)
    table.append(element("tr", {}, element("td", {}, name), element("td", {}, reason)));
  for (const [name, us] of row.theirs)
    table.append(element("tr", {}, element("td", {}, name), element("td", {}, `${time(us)} µs on the other system's page, unmeasured here`)));
  const facts = [row.tensors, row.model, row.note, row.reason && `ours ${row.status}: ${row.reason}`];
  if (row.ratio) facts.push(`ratio ${row.ratio.toFixed(3)} [${row.lo.toFixed(3)}, ${row.hi.toFixed(3)}]`);
  if (row.ours_us)
    facts.push(`spread ${(100 * row.spread).toFixed(1)} %, ${row.kernels ?? "–"} kernels, host ${time(row.host_us)} µs`);
  if (row.auto) facts.push(`auto picks ${row.auto}`);
  facts.push(`run ${row.run}, ${row.date}, commit ${row.commit}`);
  return element("tr", { class: "more" }, element("td", { colspan: COLUMNS.length }, facts.filter(Boolean).join(" · "), table));
}

// What a phone has no column for stands under a cell that it has.
const UNDER = {
  label: (r) => r.dtype,
  ratio: (r) => best(r)[0] && `${best(r)[0]} ${time(best(r)[1])}`,
};

// AdaLayerNormFwd may break before a capital that begins a word, and nowhere else.
function breakable(name) {
  return name.split(/(?=[A-Z][a-z])/).flatMap((word, i) => (i ? [element("wbr", {}), word] : [word]));
}

function line(row) {
  const tr = element("tr", { class: "row", tabindex: 0, "data-key": `${row.op}/${row.label}/${row.dtype}` });
  for (const [key, , , text, number, wide] of COLUMNS) {
    const classes = [number && "num", wide && "wide", key === "ratio" && row.verdict, key === "label" && "name"];
    const content = key === "op" ? breakable(text(row)) : [text(row)];
    if (UNDER[key]?.(row)) content.push(element("span", { class: "under" }, UNDER[key](row)));
    tr.append(element("td", { class: classes.filter(Boolean).join(" ") }, ...content));
  }
  const toggle = () => {
    if (tr.nextSibling?.className === "more") tr.nextSibling.remove();
    else tr.after(details(row));
  };
  tr.onclick = toggle;
  tr.onkeydown = (event) => event.key === "Enter" && toggle();
  return tr;
}

function drawHead() {
  byId("head").replaceChildren(
    ...COLUMNS.map(([key, heading, , , number, wide]) => {
      const active = state.get("sort") === key;
      const descending = state.get("dir") === "desc";
      const button = element("button", { type: "button" }, heading + (active ? (descending ? " ↓" : " ↑") : ""));
      button.onclick = () => {
        state.set("dir", active && !descending ? "desc" : "asc");
        change("sort", key);
      };
      const classes = [number && "num", wide && "wide"].filter(Boolean).join(" ");
      const sort = active ? (descending ? "descending" : "ascending") : "none";
      return element("th", { class: classes, "data-key": key, "aria-sort": sort }, button);
    }),
  );
}

function drawFilters() {
  const choices = { family: "All families", op: "All ops", dtype: "All dtypes" };
  for (const [name, all] of Object.entries(choices)) {
    const inFamily = (r) => name !== "op" || !state.get("family") || r.family === state.get("family");
    const values = [...new Set(rows.filter(inFamily).map((r) => r[name]))];
    const title = (v) => (name === "family" ? meta.headings[v] || v : v);
    byId(name).replaceChildren(element("option", { value: "" }, all), ...values.map((v) => element("option", { value: v }, title(v))));
    byId(name).value = state.get(name) || "";
  }
  byId("verdict").replaceChildren(
    ...VERDICTS.filter((v) => rows.some((r) => r.verdict === v)).map((v) => {
      const count = rows.filter((r) => r.verdict === v).length;
      const on = state.get("verdict") === v;
      const button = element("button", { type: "button", class: v, "aria-pressed": on }, `${GLYPHS[v]} ${TITLES[v] || v} ${count}`);
      button.onclick = () => change("verdict", on ? "" : v);
      return button;
    }),
  );
}

function draw() {
  document.documentElement.dataset.theme = theme();
  drawFilters();
  drawHead();
  const chosen = sorted(rows.filter(wanted));
  byId("rows").replaceChildren(...chosen.map(line));
  const ratios = chosen.map((r) => r.ratio).filter(Boolean);
  const mean = Math.exp(ratios.reduce((sum, r) => sum + Math.log(r), 0) / ratios.length);
  byId("count").textContent = `${chosen.length} of ${rows.length} rows` + (ratios.length ? `; geometric mean of the ratios ${mean.toFixed(2)}×` : "");
  drawPlots(chosen);
}

function theme() {
  return state.get("theme") || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
}

for (const row of rows)
  row.haystack = [row.op, row.label, row.dtype, row.model, row.family, ...row.alternatives.map(([n]) => n)].join(" ").toLowerCase();
byId("about").textContent = meta.about;
byId("csv").href = meta.rows_csv;
byId("q").value = state.get("q") || "";
byId("q").oninput = (event) => change("q", event.target.value);
for (const name of ["op", "dtype"]) byId(name).onchange = (event) => change(name, event.target.value);
byId("family").onchange = (event) => {
  state.delete("op");
  change("family", event.target.value);
};
byId("filters").onsubmit = (event) => event.preventDefault();
byId("theme").onclick = () => change("theme", theme() === "dark" ? "light" : "dark");
for (const query of ["(prefers-color-scheme: dark)", "(max-width: 44rem)"]) matchMedia(query).addEventListener("change", draw);
addEventListener("hashchange", () => location.reload());
