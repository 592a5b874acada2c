"use strict";
// Draws the figures and the pictures from the JSON in this page. Every text goes in as text, never as HTML.
(() => {
  const root = document.documentElement;
  const read = (id) => JSON.parse(document.getElementById(id).textContent);

  // Colours are names of the style sheet's variables, so that a change of theme only has to draw again.
  const resolve = (value, style) => {
    if (typeof value === "string") return value.startsWith("--") ? style.getPropertyValue(value).trim() : value;
    if (Array.isArray(value)) return value.map((item) => resolve(item, style));
    if (value === null || typeof value !== "object") return value;
    return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, resolve(item, style)]));
  };

  const figures = read("figures-data");
  const draw = () => {
    const style = getComputedStyle(root);
    const axis = { gridcolor: "--line", linecolor: "--line", zerolinecolor: "--line", automargin: true };
    for (const plot of document.querySelectorAll(".plot")) {
      const { data, layout } = figures[plot.dataset.figure];
      const whole = {
        ...layout,
        xaxis: { ...layout.xaxis, ...axis },
        yaxis: { ...layout.yaxis, ...axis },
        font: { color: "--ink", family: "system-ui, sans-serif", size: 13 },
        paper_bgcolor: "rgba(0,0,0,0)",
        plot_bgcolor: "rgba(0,0,0,0)",
        margin: { l: 48, r: 12, t: 12, b: 40 },
        legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", itemclick: false, itemdoubleclick: false },
        hoverlabel: { bgcolor: "--raised", font: { color: "--ink" } },
        dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom",
        hovermode: "x",
      };
      Plotly.react(plot, resolve(data, style), resolve(whole, style), { responsive: true, displayModeBar: false });
    }
  };

  const themeButton = document.getElementById("theme");
  const prefersDark = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : prefersDark.matches);
  const showTheme = () => {
    themeButton.textContent = isDark() ? "Light" : "Dark";
    themeButton.setAttribute("aria-label", isDark() ? "Show in light colours" : "Show in dark colours");
    draw();
  };
  themeButton.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    showTheme();
  });
  prefersDark.addEventListener("change", showTheme);
  showTheme();

  const { pictures, thumbnails } = read("gallery-data");
  const cards = document.getElementById("cards");
  if (!cards) return;

  const perPage = 6;
  let shown = pictures;
  let page = 0;

  const element = (name, text, attributes = {}) => {
    const made = document.createElement(name);
    if (text !== undefined) made.textContent = text;
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    return made;
  };
  const shape = (name, attributes, text) => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text !== undefined) made.textContent = text;
    return made;
  };

  const scene = (picture) => {
    const [width, height] = picture.space;
    const made = shape("svg", {
      viewBox: `0 0 ${width} ${height}`,
      role: "img",
      "aria-label": `${picture.name}: ${picture.facts[2]}`,
    });
    if (picture.image !== null) {
      made.append(shape("image", { href: thumbnails[picture.image], width, height, preserveAspectRatio: "none" }));
    }
    const size = Math.max(width, height) / 26;
    for (const [part, x1, y1, x2, y2, label] of picture.boxes) {
      const box = { x: x1, y: y1, width: Math.max(0, x2 - x1), height: Math.max(0, y2 - y1) };
      const rect = shape("rect", { class: `box ${part}`, ...box });
      rect.append(shape("title", {}, `${part}: ${label}`));
      made.append(rect);
      if (part !== "matched") {
        const y = part === "false" ? Math.min(height - size / 4, y2 + size) : Math.max(size, y1 - size / 4);
        made.append(shape("text", { class: "tag", x: x1, y, "font-size": size, "stroke-width": size / 6 }, label));
      }
    }
    return made;
  };

  const card = (picture) => {
    const made = element("article", undefined, { class: "card" });
    made.append(element("h3", picture.name));
    made.append(scene(picture));
    if (picture.trouble) made.append(element("p", `No image: ${picture.trouble}`, { class: "warn" }));
    made.append(element("p", picture.fate));
    for (const fact of picture.facts) made.append(element("p", fact));
    for (const [title, text] of [["Rollout", picture.rollout], ["Target", picture.target]]) {
      made.append(element("h4", title), element("pre", text, { tabindex: "0", "aria-label": title }));
    }
    return made;
  };

  const [previous, next] = ["previous", "next"].map((id) => document.getElementById(id));
  const show = () => {
    const pages = Math.max(1, Math.ceil(shown.length / perPage));
    page = Math.min(Math.max(0, page), pages - 1);
    cards.replaceChildren(...shown.slice(page * perPage, (page + 1) * perPage).map(card));
    document.getElementById("place").textContent = `page ${page + 1} of ${pages}, ${shown.length} pictures`;
    previous.setAttribute("aria-disabled", String(page === 0));
    next.setAttribute("aria-disabled", String(page === pages - 1));
  };
  const turn = (by) => {
    page += by;
    show();
  };

  previous.addEventListener("click", () => turn(-1));
  next.addEventListener("click", () => turn(1));
  document.getElementById("pictures").addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!by || event.altKey || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    turn(by);
  });
  for (const button of document.querySelectorAll("[data-filter]")) {
    button.addEventListener("click", () => {
      const wanted = button.dataset.filter;
      for (const other of document.querySelectorAll("[data-filter]")) {
        other.setAttribute("aria-pressed", String(other === button));
      }
      shown = wanted === "all" ? pictures : pictures.filter((picture) => picture.outcomes.includes(wanted));
      page = 0;
      show();
    });
  }
  show();
})();
