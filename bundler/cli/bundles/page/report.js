"use strict";
// What the page shows is in the page: facts as JSON, texts of kernels as shared lines and runs of them (TextArchive of report_page.py).  Everything of a
// bundle goes into the document as text, never as markup.
const facts = JSON.parse(document.getElementById("facts").textContent);
const kernels = new Map(facts.kernels.map((one) => [one.key, one]));
const main = document.getElementById("main");
const SVG = "http://www.w3.org/2000/svg";
const KINDS = ["python", "source", "ttir", "ttgir", "llir", "ptx", "amdgcn"];

// Elements and words -------------------------------------------------------------------------------------------------

function make(tag, attributes = {}, ...children) {
  const element = tag.startsWith("svg:") ? document.createElementNS(SVG, tag.slice(4)) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

const number = (value) => (value === null || value === undefined ? "–" : value.toLocaleString("en-US"));
const percent = (value) => (value === null || value === undefined ? "–" : `${Math.round(value * 100)} %`);
function bytes(value) {
  if (value === null || value === undefined) return "–";
  const units = ["B", "KB", "MB", "GB"];
  let unit = 0;
  for (; value >= 1000 && unit < 3; unit += 1) value /= 1000;
  return `${unit && value < 100 ? value.toFixed(1) : Math.round(value)} ${units[unit]}`;
}
function duration(microseconds) {
  if (microseconds === null || microseconds === undefined) return "–";
  if (microseconds >= 1e8) return `${Math.round(microseconds / 6e7)} min`;
  return microseconds >= 1e6 ? `${(microseconds / 1e6).toFixed(1)} s` : `${(microseconds / 1e3).toFixed(1)} ms`;
}
// Numbers in names and constants count as numbers: 64 goes before 128.
const compare = new Intl.Collator("en", { numeric: true }).compare;
// As many colours as there are kinds: hues at equal steps, every second one darker.
const colour = (place, count) => `hsl(${Math.round((360 * place) / count)} var(--saturation) var(--${place % 2 ? "deep" : "pale"}))`;
const words = (values) => (values ? Object.entries(values).map(([name, value]) => `${name}=${typeof value === "object" ? JSON.stringify(value) : value}`).join(", ") : "");
const say = (text) => { document.getElementById("status").textContent = text; };

function list(pairs) {
  return make("dl", { class: "facts" }, ...pairs.filter(([, value]) => value !== "" && value !== null && value !== undefined)
    .flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)]));
}

// Texts --------------------------------------------------------------------------------------------------------------

let archive = null;
async function inflated(id) {
  const packed = document.getElementById(id).textContent;
  const data = Uint8Array.from(atob(packed), (character) => character.charCodeAt(0));
  return new Response(new Blob([data]).stream().pipeThrough(new DecompressionStream("deflate"))).arrayBuffer();
}
async function lines_of(place) {
  if (archive === null) {
    const [lines, runs] = await Promise.all([inflated("lines"), inflated("runs")]);
    archive = { lines: new TextDecoder().decode(lines).split("\n"), runs: new DataView(runs) };
  }
  const [begin, count] = place;
  const found = [];
  for (let run = begin; run < begin + count; run += 1) {
    const first = archive.runs.getUint32(run * 8, true);
    found.push(...archive.lines.slice(first, first + archive.runs.getUint32(run * 8 + 4, true)));
  }
  return found;
}

// The line of the kernel's function that each line of a text came from, as "file:line"; null where it says none.
const base = (path) => path.replace(/\\/g, "/").split("/").pop();
const READERS = {
  python: (lines, file) => lines.map((_, index) => `${file}:${index + 1}`),
  mlir(lines) {
    const raw = new Map();
    for (const line of lines) {
      const found = /^#(loc\d*) = loc\((.*)\)\s*$/.exec(line);
      if (found) raw.set(found[1], found[2]);
    }
    const resolve = (text, depth = 0) => {
      const file = /^"([^"]+)":(\d+):\d+/.exec(text);
      if (file) return `${base(file[1])}:${file[2]}`;
      const other = /#(loc\d*)/.exec(text);
      return other && depth < 8 && raw.has(other[1]) ? resolve(raw.get(other[1]), depth + 1) : null;
    };
    return lines.map((line) => {
      const found = /^#/.test(line) ? null : /loc\((#loc\d*|"[^"]+":\d+:\d+)[^()]*\)\s*$/.exec(line);
      return found ? resolve(found[1].startsWith("#") ? raw.get(found[1].slice(1)) || "" : found[1]) : null;
    });
  },
  llir(lines) {
    const nodes = new Map();
    for (const line of lines) {
      const found = /^(!\d+) = (?:distinct )?(!DI\w+\(.*)$/.exec(line);
      if (found) nodes.set(found[1], found[2]);
    }
    const field = (node, name) => (new RegExp(`\\b${name}: (!?\\w+|"[^"]*")`).exec(node || "") || [])[1];
    const file = (scope, depth = 0) => {
      const node = nodes.get(scope);
      if (!node || depth > 8) return null;
      const named = field(node, "file");
      return named ? base((field(nodes.get(named), "filename") || '""').slice(1, -1)) : file(field(node, "scope"), depth + 1);
    };
    return lines.map((line) => {
      const node = nodes.get((/!dbg (!\d+)/.exec(line) || [])[1]);
      const at = node && node.startsWith("!DILocation(") ? field(node, "line") : null;
      return at && at !== "0" ? `${file(field(node, "scope"))}:${at}` : null;
    });
  },
  assembly(lines) {
    const files = new Map();
    for (const line of lines) {
      const found = /^\s*\.file\s+(\d+)\s+(?:"[^"]*"\s+)?"([^"]+)"/.exec(line);
      if (found) files.set(found[1], base(found[2]));
    }
    let current = null;
    return lines.map((line) => {
      const found = /^\s*\.loc\s+(\d+)\s+(\d+)/.exec(line);
      if (found) current = found[2] === "0" ? null : `${files.get(found[1])}:${found[2]}`;
      else if (/^\S*(func_end|end_function|tmp_end)|^}/.test(line)) current = null;
      return found ? null : /^\s+[a-z@{%]/.test(line) ? current : null;
    });
  },
};
const READER_OF = { source: "mlir", ttir: "mlir", ttgir: "mlir", llir: "llir", ptx: "assembly", amdgcn: "assembly" };

// Parts --------------------------------------------------------------------------------------------------------------

function overview() {
  const all = facts.overview;
  const card = (name, value) => make("div", {}, make("dt", {}, name), make("dd", {}, value));
  main.append(
    make("h2", {}, "Overview"),
    make("dl", { class: "cards" },
      card("kernels", number(all.kernels)), card("functions", number(all.names)),
      card("targets", Object.entries(all.targets).map(([target, count]) => `${target} × ${count}`).join(", ") || "–"),
      card("all files", bytes(all.stored_bytes)), card("compile time saved by each start", duration(all.compile_us)),
      card("same binary as another", number(all.same_binaries)), card("files shared", number(all.shared_files)),
      card("other builds left out", number(all.variants_dropped)), card("tuning records", number(all.tuning_records))),
    make("p", { class: "soft" }, `${all.digest}; compile times of ${number(all.timed_kernels)} of ${number(all.kernels)} kernels are known`));
  main.append(make("h2", {}, "Sizes by kind"), map(), legend());
  if (all.environments.length) {
    main.append(make("h2", {}, "Recorded on"));
    for (const one of all.environments) main.append(list(Object.entries(one)));
  }
}

function map() {
  const drawing = make("svg:svg", { viewBox: "0 0 960 360", class: "map", role: "img", "aria-label": `Sizes by kind: ${facts.treemap.map((one) => `${one.kind} ${bytes(one.bytes)}`).join(", ")}` });
  facts.treemap.forEach((kind, place) => {
    for (const { key, bytes: size, box: [x, y, width, height] } of kind.cells) {
      const named = kernels.get(key);
      const cell = make("svg:rect", { x, y, width, height, class: "cell", style: `fill: ${colour(place, facts.treemap.length)}` },
        make("svg:title", {}, `${kind.kind}: ${named ? `${named.name} ${named.target}` : "all other kernels"}, ${bytes(size)}`));
      if (named) { cell.style.cursor = "pointer"; cell.addEventListener("click", () => { location.hash = `#/kernel/${key}`; }); }
      drawing.append(cell);
    }
    const [x, y, width, height] = kind.box;
    drawing.append(make("svg:rect", { x, y, width, height, class: "kind" }));
    if (width > 60 && height > 20) drawing.append(make("svg:text", { x: x + 8, y: y + 18 }, `${kind.kind} ${bytes(kind.bytes)}`));
  });
  return drawing;
}

function legend() {
  return make("ul", { class: "legend" }, ...facts.treemap.map((one, place) =>
    make("li", {}, make("span", { style: `background: ${colour(place, facts.treemap.length)}` }), `${one.kind}: ${bytes(one.bytes)}`)));
}

const COLUMNS = [
  ["name", "name", (one) => one.name], ["target", "target", (one) => one.target],
  ["constants", "constants", (one) => words(one.constants)],
  ["warps", "warps", (one) => one.warps], ["stages", "stages", (one) => one.stages], ["registers", "registers", (one) => one.registers],
  ["spills", "spills", (one) => one.spills], ["stack_bytes", "stack", (one) => one.stack_bytes, bytes],
  ["shared", "shared memory", (one) => (one.static_shared_bytes || 0) + one.dynamic_shared_bytes, bytes],
  ["occupancy", "occupancy", (one) => one.occupancy, percent], ["binary", "binary", (one) => one.binary_bytes, bytes],
  ["compile", "compile", (one) => one.compile_us, duration],
  ["hits", "hits", (one) => one.hits],
];
const view = { sort: "name", down: false, text: "", target: "" };
// What rows are ordered by where the chosen column says nothing: of one name by target, constants, then what they were compiled with.
const TIES = [(one) => one.name, (one) => one.target, (one) => words(one.constants), (one) => one.warps, (one) => one.stages, (one) => words(one.signature), (one) => one.key];
const in_order = [...facts.kernels].sort((one, two) => TIES.reduce((found, tie) => found || compare(String(tie(one)), String(tie(two))), 0));
// Inductor names a kernel after everything in it.  The whole name is the title, and stands on the kernel's own page.
const LONGEST = 72;
const shortened = (text) => (text.length > LONGEST ? `${text.slice(0, LONGEST - 24)}…${text.slice(-20)}` : text);
// A name may go on in the next line after an underscore.
const breakable = (text) => text.split(/(?<=_)(?=[^_])/).flatMap((part, place) => (place ? [make("wbr"), part] : [part]));

function table() {
  const body = make("tbody", {});
  const heads = COLUMNS.map(([id, title], place) => {
    const head = make("th", { scope: "col", class: place > 2 ? "number" : null }, make("button", { type: "button", "data-column": id, onclick: () => {
      view.down = view.sort === id ? !view.down : place > 2;
      view.sort = id;
      fill();
    } }, title));
    return head;
  });
  const fill = () => {
    const [, , value] = COLUMNS.find(([id]) => id === view.sort);
    const wanted = view.text.toLowerCase().split(/\s+/).filter(Boolean);
    const rows = in_order.filter((one) => (!view.target || one.target === view.target)
      && wanted.every((word) => `${one.name} ${one.target} ${one.key} ${words(one.constants)}`.toLowerCase().includes(word)));
    const sign = view.down ? -1 : 1;
    rows.sort((one, two) => {
      const [a, b] = [value(one), value(two)];
      if (a === null || a === undefined || b === null || b === undefined) return (a === null || a === undefined ? 1 : 0) - (b === null || b === undefined ? 1 : 0);
      return sign * (typeof a === "number" ? a - b : compare(String(a), String(b)));
    });
    body.replaceChildren(...rows.map((one) => make("tr", {}, ...COLUMNS.map(([id, , read, show], place) => {
      const shown = show ? show(read(one)) : place > 2 ? number(read(one)) : read(one);
      const cell = make("td", { class: place > 2 ? "number" : id, "data-title": COLUMNS[place][1] });
      cell.append(id === "name" ? make("a", { href: `#/kernel/${one.key}`, title: shown }, ...breakable(shortened(shown))) : id === "target" ? shown : place > 2 ? shown : make("span", { title: shown }, shortened(shown)));
      return cell;
    }))));
    heads.forEach((head, place) => head.setAttribute("aria-sort", COLUMNS[place][0] === view.sort ? (view.down ? "descending" : "ascending") : "none"));
    say(`${rows.length} of ${facts.kernels.length} kernels, sorted by ${view.sort}`);
    count.textContent = `${number(rows.length)} of ${number(facts.kernels.length)}`;
  };
  const count = make("span", { class: "soft" });
  const targets = [...new Set(facts.kernels.map((one) => one.target))].sort();
  main.append(make("h2", {}, "Kernels"),
    make("div", { class: "filters" },
      make("label", {}, "Filter", make("input", { type: "search", id: "filter", value: view.text, placeholder: "name, target, constant, key", oninput: (event) => { view.text = event.target.value; fill(); } })),
      make("label", {}, "Target", make("select", { id: "target", onchange: (event) => { view.target = event.target.value; fill(); } },
        make("option", { value: "" }, "all"), ...targets.map((one) => make("option", { value: one, selected: one === view.target }, one)))), count),
    make("div", { class: "scroll" }, make("table", { id: "kernels", class: "cards-when-narrow" }, make("caption", { class: "soft" }, "Press a heading to sort by it."), make("thead", {}, make("tr", {}, ...heads)), body)));
  fill();
}

function kernel(key) {
  const one = kernels.get(key);
  if (!one) { main.append(make("h2", {}, "No such kernel"), make("p", {}, key)); return; }
  const stages = Object.entries(one.stages_us);
  const longest = Math.max(1, ...stages.map(([, time]) => time));
  main.append(make("h2", {}, ...breakable(one.name), ` · ${one.target}`), list([
    ["key", one.key], ["constants", words(one.constants)], ["signature", words(one.signature)], ["options", words(one.options)],
    ["launch", `${one.warps} warps, ${one.blocks_of_cluster} block${one.blocks_of_cluster === 1 ? "" : "s"} a cluster${one.stages === null ? "" : `, ${one.stages} stages`}`],
    ["a thread", `${number(one.registers)} registers, ${number(one.spills)} spilled, ${bytes(one.stack_bytes)} of stack`],
    ["a block", `${bytes(one.static_shared_bytes)} of static and ${bytes(one.dynamic_shared_bytes)} of dynamic shared memory`],
    ["occupancy", one.occupancy === null ? "not known" : `${percent(one.occupancy)}, held back by ${one.occupancy_limit}`],
    ["devices", one.devices.join(", ")], ["files", one.files.map(([kind, size]) => `${kind} ${bytes(size)}`).join(", ")], ["problem", one.problem],
  ]));
  if (stages.length) {
    main.append(make("h2", {}, `Compile, ${duration(one.compile_us)}`), make("table", { class: "bars" }, make("tbody", {}, ...stages.map(([stage, time]) =>
      make("tr", {}, make("th", { scope: "row" }, stage), make("td", { class: "number" }, duration(time)), make("td", { class: "bar" }, make("span", { style: `width: ${(100 * time) / longest}%` })))))));
  }
  const tuned = facts.tunings.filter((tuning) => tuning.timings.some((timing) => timing.key === key));
  for (const tuning of tuned) main.append(make("h2", {}, "Tuning"), chart(tuning, key));
  const kinds = KINDS.filter((kind) => one.texts[kind]);
  if (!kinds.length) { main.append(make("p", { class: "soft" }, "The texts of this kernel are not in this report.")); return; }
  const shown = new Set(kinds.filter((kind) => ["python", "ttgir", "ptx", "amdgcn"].includes(kind)));
  if (shown.size < 2) kinds.slice(0, 3).forEach((kind) => shown.add(kind));
  const panes = make("div", { class: "panes" });
  const draw = () => { show_panes(panes, one, kinds.filter((kind) => shown.has(kind))); };
  main.append(make("h2", {}, "Texts"), make("fieldset", { class: "filters" }, make("legend", {}, "Show; a line marks those of the same source line. Arrow keys move, Enter marks."),
    ...kinds.map((kind) => make("label", {}, make("input", { type: "checkbox", value: kind, checked: shown.has(kind), onchange: (event) => {
      if (event.target.checked) shown.add(kind); else shown.delete(kind);
      draw();
    } }), kind))), panes);
  draw();
}

async function show_panes(panes, one, kinds) {
  const texts = await Promise.all(kinds.map((kind) => lines_of(one.texts[kind])));
  const read = (kind, place) => (kind === "python" ? null : READERS[READER_OF[kind]](texts[place]));
  const origins = kinds.map(read);
  const file = (origins.flat().find(Boolean) || ":").split(":")[0];
  kinds.forEach((kind, place) => { if (kind === "python") origins[place] = READERS.python(texts[place], file); });
  const codes = [];
  const mark = (from, at) => {
    const origin = origins[from][at];
    codes.forEach((code, place) => {
      let first = null;
      [...code.children].forEach((line, row) => {
        const linked = origin !== null && origins[place][row] === origin;
        line.classList.toggle("linked", linked);
        if (linked && first === null) first = line;
      });
      if (place !== from && first) code.scrollTop = first.offsetTop - code.offsetTop - code.clientHeight / 3;
    });
    say(origin === null ? "no source line" : `source line ${origin}`);
  };
  panes.replaceChildren(...kinds.map((kind, place) => {
    const code = make("div", { class: "code", tabindex: "0", role: "region", "aria-label": `${kind} of ${one.name}`, "data-kind": kind, onkeydown: (event) => {
      const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
      const now = [...code.children].findIndex((line) => line.classList.contains("current"));
      if (step) {
        const next = Math.min(code.children.length - 1, Math.max(0, now + step));
        move(next);
        code.children[next].scrollIntoView({ block: "nearest" });
        event.preventDefault();
      } else if (event.key === "Enter" && now >= 0) mark(place, now);
    } }, ...texts[place].map((line, row) => make("div", { onclick: () => { move(row); mark(place, row); } }, line || " ")));
    const move = (row) => { [...code.children].forEach((line, at) => line.classList.toggle("current", at === row)); };
    codes.push(code);
    const begins = kind === "python" ? texts[place].findIndex((line) => line.includes(`def ${one.name}(`)) : -1;
    if (begins > 0) requestAnimationFrame(() => { code.scrollTop = code.children[begins].offsetTop - code.offsetTop; });
    return make("section", { class: "pane" }, make("h3", {}, `${kind} · ${number(texts[place].length)} lines`), code);
  }));
}

function chart(tuning, current) {
  const timed = [...tuning.timings].sort((one, two) => (one.time_ns ?? Infinity) - (two.time_ns ?? Infinity));
  const slowest = Math.max(1, ...timed.map((one) => one.time_ns || 0));
  return make("div", { class: "scroll" }, make("table", { class: "bars" }, make("thead", {}, make("tr", {}, ...["config", "time of a launch", "", "20 to 80 %"].map((title) => make("th", { scope: "col" }, title)))),
    make("tbody", {}, ...timed.map((one) => make("tr", {},
      make("td", { class: "wide" }, kernels.has(one.key) && one.key !== current ? make("a", { href: `#/kernel/${one.key}` }, words(one.config)) : words(one.config)),
      make("td", { class: "number" }, one.time_ns === null ? one.reason || "–" : duration(one.time_ns / 1e3)),
      make("td", { class: "bar" }, one.time_ns === null ? "" : make("span", { style: `width: ${(100 * one.time_ns) / slowest}%` })),
      make("td", {}, one.low_ns === null ? "" : `${duration(one.low_ns / 1e3)} to ${duration(one.high_ns / 1e3)}`))))));
}

function tunings() {
  main.append(make("h2", {}, "Tuning"));
  for (const one of facts.tunings) {
    main.append(make("h2", {}, one.kernel), list([["config", words(one.config)], ["time of a launch", one.time_ns === null ? "" : duration(one.time_ns / 1e3)], ["found by", one.found_by], ["device", one.device]]));
    if (one.timings.length) main.append(chart(one, null));
  }
}

function difference() {
  const diff = facts.diff;
  main.append(make("h2", {}, `${facts.name} beside ${diff.name}`), make("p", {}, `${diff.added.length} added, ${diff.removed.length} removed, ${diff.changed.length} changed, ${number(diff.same)} the same`));
  for (const [title, rows] of [["Added", diff.added], ["Removed", diff.removed], ["Changed", diff.changed]]) {
    if (!rows.length) continue;
    const heads = ["name", "target", "key", ...(title === "Changed" ? ["what changed"] : [])];
    main.append(make("h2", {}, title), make("div", { class: "scroll" }, make("table", { class: "diff" }, make("thead", {}, make("tr", {}, ...heads.map((head) => make("th", { scope: "col" }, head)))),
      make("tbody", {}, ...rows.map((row) => make("tr", {}, make("td", { class: "wide" }, kernels.has(row.key) ? make("a", { href: `#/kernel/${row.key}` }, row.name) : row.name),
        make("td", {}, row.target), make("td", {}, row.key.slice(0, 12)), title === "Changed" ? make("td", { class: "wide" }, row.changes.join(", ")) : null))))));
  }
}

function programs() {
  main.append(make("h2", {}, "Programs"));
  for (const one of facts.programs) {
    main.append(make("h3", {}, one.name), list(one.problem ? [["problem", one.problem]] : [
      ["does", `${number(one.launches)} launches of ${number(one.kernels)} kernels`],
      ["inputs", one.inputs.join(", ") || "none"], ["sizes", Object.entries(one.sizes).map(([size, place]) => `${size} is ${place}`).join(", ")],
      ["constants", one.constants.join(", ") || "none"], ["results", one.results.join(", ") || "none"], ["memory", one.memory],
      ["needs torch", one.operators.join(", ") || "no"], ["random", one.random ? "it draws random numbers" : ""],
      ["code", one.code ? "it calls operators of yours or of others: trust in code is needed" : ""], ["targets", one.targets.join(", ") || (one.kernels ? "none" : "any")],
    ]));
  }
}

function misses() {
  main.append(make("h2", {}, "Why kernels were compiled here"));
  if (!facts.misses.length) main.append(make("p", { class: "soft" }, "The latest process here compiled nothing."));
  for (const one of facts.misses) {
    main.append(make("p", {}, one.sentence));
    if (one.source_diff) main.append(make("pre", {}, one.source_diff));
  }
}

// Places -------------------------------------------------------------------------------------------------------------

const TABS = [["overview", "Overview", overview], ["kernels", "Kernels", table]];
if (facts.tunings.length) TABS.push(["tuning", "Tuning", tunings]);
if (facts.diff) TABS.push(["diff", "Diff", difference]);
if (facts.programs.length) TABS.push(["programs", "Programs", programs]);
if (facts.misses) TABS.push(["misses", "Misses", misses]);

function go() {
  const [, place = "overview", key] = location.hash.split("/");
  const tab = place === "kernel" ? "kernels" : place;
  const [, title, draw] = TABS.find(([id]) => id === tab) || TABS[0];
  document.getElementById("tabs").replaceChildren(...TABS.map(([id, name]) => make("li", {}, make("a", { href: `#/${id}`, "aria-current": id === tab ? "page" : null }, name))));
  main.replaceChildren();
  if (place === "kernel") kernel(decodeURIComponent(key || "")); else draw();
  const one = place === "kernel" && kernels.get(key);
  document.title = `${one ? one.name : title} – ${facts.name}`;
  scrollTo(0, 0);
}

const theme = document.getElementById("theme");
const dark = () => (document.documentElement.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
const name_theme = () => { theme.textContent = dark() ? "Light" : "Dark"; };
theme.addEventListener("click", () => { document.documentElement.dataset.theme = dark() ? "light" : "dark"; name_theme(); });
name_theme();
document.getElementById("title").textContent = facts.name;
addEventListener("hashchange", () => { go(); main.focus({ preventScroll: true }); });
go();
