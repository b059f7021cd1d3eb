for (const table of document.querySelectorAll("table.sort")) {
  const heads = [...table.tHead.rows[0].cells], body = table.tBodies[0];
  heads.forEach((head, column) => head.firstChild.addEventListener("click", () => {
    const up = head.getAttribute("aria-sort") === "descending" ? true : head.hasAttribute("aria-sort") ? false : column < 2;
    heads.forEach(other => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", up ? "ascending" : "descending");
    const key = row => { const cell = row.cells[column]; return cell.dataset.v ?? cell.textContent.trim(); };
    const empty = text => text === "" || text === "–";
    const rows = [...body.rows].sort((a, b) => {
      const x = key(a), y = key(b);
      if (empty(x) || empty(y)) return empty(x) - empty(y);
      const order = isNaN(x) || isNaN(y) ? x.localeCompare(y, undefined, {numeric: true}) : x - y;
      return up ? order : -order;
    });
    body.append(...rows);
  }));
}
const made = (tag, kind, text) => Object.assign(document.createElement(tag), {className: kind, textContent: text});
const save = (name, href) => Object.assign(document.createElement("a"), {download: name, href}).click();
const named = text => text.trim().toLowerCase().replace(/[^a-z0-9]+/g, "-").replace(/^-|-$/g, "").slice(0, 60) || "fedatlas";
const words = cell => { const c = cell.cloneNode(true); c.querySelectorAll("sup,.sr,.get").forEach(n => n.remove()); return c.textContent.trim(); };
const quoted = text => `"${text.replaceAll('"', '""')}"`;
const csv = table => {
  const head = [...table.tHead.rows], titles = [...head.pop().cells].map(words);
  const groups = head.flatMap(row => [...row.cells].flatMap(cell => Array(cell.colSpan).fill(words(cell))));
  const lines = [...table.tBodies[0].rows].map(row => [...row.cells].map(cell => cell.dataset.v ?? words(cell)));
  const first = titles.map((title, place) => groups[place] ? `${groups[place]}: ${title}` : title);
  return [first, ...lines].map(line => line.map(quoted).join(",")).join("\n") + "\n";
};
for (const table of document.querySelectorAll("table")) {
  const title = table.caption?.textContent ?? table.closest("section").id, button = made("button", "get", "CSV");
  button.type = "button";
  button.addEventListener("click", () => save(`${named(title)}.csv`, URL.createObjectURL(new Blob([csv(table)], {type: "text/csv"}))));
  (table.caption ?? table.createCaption()).append(button);
  if (table.classList.contains("filter")) {
    const box = Object.assign(made("input", "find", ""), {type: "search", placeholder: "filter rows", ariaLabel: "Filter rows"});
    box.addEventListener("input", () => { const wanted = box.value.toLowerCase();
      for (const row of table.tBodies[0].rows) row.hidden = !row.textContent.toLowerCase().includes(wanted); });
    table.caption.append(box);
  }
}
function png(svg, name) {
  const size = {width: svg.viewBox.baseVal.width * 1.5, height: svg.viewBox.baseVal.height * 1.5}, copy = svg.cloneNode(true), look = getComputedStyle(document.documentElement);
  const colours = ["paper", "ink", "muted", "grid", "accent", "bad", ...["c", "s", "p"].flatMap(l => [...Array(12).keys()].map(n => l + n))];
  const style = document.createElementNS(svg.namespaceURI, "style");
  style.textContent = `:root{${colours.map(c => `--${c}:${look.getPropertyValue("--" + c)}`).join(";")}}text{font-family:sans-serif}.tips{display:none}`;
  copy.prepend(style);
    copy.setAttribute("width", size.width); copy.setAttribute("height", size.height);
  const image = new Image();
  image.onload = () => {
    const canvas = Object.assign(document.createElement("canvas"), {width: 2 * size.width, height: 2 * size.height});
    const draw = canvas.getContext("2d");
    draw.fillStyle = look.getPropertyValue("--paper"); draw.fillRect(0, 0, canvas.width, canvas.height);
    draw.drawImage(image, 0, 0, canvas.width, canvas.height);
    save(`${name}.png`, canvas.toDataURL("image/png"));
  };
  image.src = "data:image/svg+xml;charset=utf-8," + encodeURIComponent(new XMLSerializer().serializeToString(copy));
}
for (const chart of document.querySelectorAll("figure.chart")) {
  const button = made("button", "get", "PNG"), title = chart.querySelector("figcaption");
  const name = named(title.textContent);
  button.type = "button";
  button.addEventListener("click", () => png(chart.querySelector("svg"), name));
  title.append(button);
}
const tip = made("div", "", ""); tip.id = "tip"; document.body.append(tip);
for (const kind of ["pointerover", "pointerdown"]) addEventListener(kind, event => {
  const text = event.target.dataset?.tip;
  tip.style.display = text ? "block" : "none";
  if (!text) return;
  tip.textContent = text;
  tip.style.left = Math.min(event.clientX + 12, innerWidth - tip.offsetWidth - 8) + "px";
  tip.style.top = Math.max(event.clientY - tip.offsetHeight - 10, 4) + "px";
});
addEventListener("beforeprint", () => document.querySelectorAll("section > details, header > details").forEach(d => d.open = true));
