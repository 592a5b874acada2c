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

  // Series differ in colour and in line, marker or pattern, so that nobody needs to tell colours apart.
  const numColours = 8; // --series-0 and so on in the style sheet
  const dashes = ["solid", "dash", "dot", "dashdot", "longdash", "longdashdot"];
  const markers = ["circle", "square", "diamond", "cross", "triangle-up", "x"];
  const patterns = ["", "/", ".", "x", "-", "\\", "|", "+"];
  const few = 60; // points up to which each is marked
  const pick = (choices, number) => choices[number % choices.length];
  const bounds = ({ y, low, high }, color) => {
    if (!low.length) return {};
    const known = y.map((value) => value ?? 0);
    const array = high.map((value, place) => value - known[place]);
    const arrayminus = low.map((value, place) => known[place] - value);
    return { error_y: { type: "data", symmetric: false, array, arrayminus, color } };
  };
  const trace = (series, number) => {
    const { name, mark, x, y } = series;
    const color = `--series-${number % numColours}`;
    const marker = { color, symbol: pick(markers, number) };
    const scatter = { type: "scatter", name, x, y };
    switch (mark) {
      case "bars":
        return { ...scatter, type: "bar", marker: { color } };
      case "stack": {
        const look = { fillcolor: color, fillpattern: { shape: pick(patterns, number), size: 6 } };
        return { ...scatter, mode: "lines", stackgroup: "all", line: { width: 0.5, color }, ...look };
      }
      case "points":
        return { ...scatter, mode: "markers", marker: { ...marker, size: 7 }, ...bounds(series, color) };
      default: {
        const line = { color, dash: pick(dashes, number), shape: mark === "stairs" ? "hv" : "linear", width: 2 };
        const mode = x.length <= few && mark === "line" ? "lines+markers" : "lines";
        const group = series.low.length ? { legendgroup: name } : {};
        const interval = x.length === 1 ? bounds(series, color) : {}; // an area of one point has no width
        return { ...scatter, ...group, mode, line, marker: { ...marker, size: 6 }, ...interval };
      }
    }
  };
  // The interval of a line, as an area behind it.
  const band = ({ name, mark, x, low, high }, number) => {
    if (mark !== "line" || !low.length) return [];
    const outline = { x: [...x, ...x.toReversed()], y: [...high, ...low.toReversed()] };
    const look = { type: "scatter", mode: "lines", fill: "toself", fillcolor: `--series-${number % numColours}` };
    return [{ ...outline, ...look, opacity: 0.15, line: { width: 0 }, legendgroup: name, showlegend: false, hoverinfo: "skip" }];
  };
  const limitLine = ({ name, value }, first, last) => ({
    type: "scatter",
    mode: "lines",
    name: `${name} = ${Number(value.toPrecision(6))}`,
    x: [first, last],
    y: [value, value],
    line: { color: "--limit", dash: "dash", width: 2 },
  });
  // Ticks at integers only, where a few of them cover everything.
  const axisOf = (title, values) => {
    const known = values.filter((value) => value !== null);
    const isFew = known.length && Math.max(...known) <= 10 && known.every(Number.isInteger);
    return { title: { text: title, standoff: 8 }, ...(isFew ? { dtick: 1 } : {}) };
  };
  const figure = (chart) => {
    const drawn = chart.series.filter(({ x }) => x.length);
    const places = drawn.flatMap(({ x }) => x);
    const limits = drawn.length ? chart.limits : [];
    const lines = limits.map((limit) => limitLine(limit, Math.min(...places), Math.max(...places)));
    const data = [...drawn.flatMap(band), ...drawn.map(trace), ...lines];
    const xaxis = axisOf(chart.x_title, data.flatMap(({ x }) => x));
    const yaxis = { ...axisOf(chart.y_title, data.flatMap(({ y }) => y)), rangemode: "tozero" };
    return { data, layout: { xaxis, yaxis, showlegend: drawn.length + lines.length > 1 } };
  };

  const charts = read("charts-data");
  const draw = () => {
    const style = getComputedStyle(root);
    const axis = { gridcolor: "--line", linecolor: "--line", zerolinecolor: "--line", automargin: true };
    for (const plot of document.querySelectorAll(".plot")) {
      const { data, layout } = figure(charts[plot.dataset.figure]);
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

  const scene = (picture, thumbnails) => {
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
    for (const [part, ...place] of picture.boxes) {
      const label = place.pop();
      const [x1, y1, x2 = x1, y2 = y1] = place;
      const drawn =
        place.length === 2
          ? shape("circle", { class: `box ${part}`, cx: x1, cy: y1, r: size / 3 })
          : shape("rect", {
              class: `box ${part}`,
              x: x1,
              y: y1,
              width: Math.max(0, x2 - x1),
              height: Math.max(0, y2 - y1),
            });
      drawn.append(shape("title", {}, `${part}: ${label}`));
      made.append(drawn);
      if (part !== "matched") {
        const below = { first: y1 + size, false: y2 + size, second: y2 + size }[part];
        const y = below ? Math.min(height - size / 4, below) : Math.max(size, y1 - size / 4);
        made.append(shape("text", { class: "tag", x: x1, y, "font-size": size, "stroke-width": size / 6 }, label));
      }
    }
    return made;
  };

  const card = (picture, { thumbnails, texts }) => {
    const made = element("article", undefined, { class: "card" });
    made.append(element("h3", picture.name));
    made.append(scene(picture, thumbnails));
    if (picture.trouble) made.append(element("p", `No image: ${picture.trouble}`, { class: "warn" }));
    made.append(element("p", picture.fate));
    for (const fact of picture.facts) made.append(element("p", fact));
    for (const [title, text] of [[texts[0], picture.rollout], [texts[1], picture.target]]) {
      made.append(element("h4", title), element("pre", text, { tabindex: "0", "aria-label": title }));
    }
    return made;
  };

  // Pictures of one group stay on one page, under its heading.
  const perPage = 6;
  const pagesOf = (pictures) => {
    const pages = [[]];
    for (const picture of pictures) {
      const last = pages.at(-1);
      const isTogether = picture.group !== null && last.at(-1)?.group === picture.group;
      if (last.length >= perPage && !isTogether) pages.push([picture]);
      else last.push(picture);
    }
    return pages;
  };
  const cardsOf = (pictures, gallery) =>
    pictures.flatMap((picture, place) => {
      const begins = picture.group !== null && picture.group !== pictures[place - 1]?.group;
      return [...(begins ? [element("h3", picture.group, { class: "group" })] : []), card(picture, gallery)];
    });
  const browse = (place, gallery) => {
    const find = (name) => place.querySelector(`.${name}`);
    const [previous, next] = [find("previous"), find("next")];
    let shown = gallery.pictures;
    let page = 0;
    const show = () => {
      const pages = pagesOf(shown);
      page = Math.min(Math.max(0, page), pages.length - 1);
      find("cards").replaceChildren(...cardsOf(pages[page], gallery));
      find("place").textContent = `page ${page + 1} of ${pages.length}, ${shown.length} pictures`;
      previous.setAttribute("aria-disabled", String(page === 0));
      next.setAttribute("aria-disabled", String(page === pages.length - 1));
    };
    const turn = (by) => {
      page += by;
      show();
    };

    previous.addEventListener("click", () => turn(-1));
    next.addEventListener("click", () => turn(1));
    place.addEventListener("keydown", (event) => {
      const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!by || event.altKey || event.ctrlKey || event.metaKey) return;
      event.preventDefault();
      turn(by);
    });
    const buttons = place.querySelectorAll("[data-filter]");
    for (const button of buttons) {
      button.addEventListener("click", () => {
        const wanted = button.dataset.filter;
        for (const other of buttons) other.setAttribute("aria-pressed", String(other === button));
        shown = gallery.pictures.filter(({ outcomes }) => wanted === "all" || outcomes.includes(wanted));
        page = 0;
        show();
      });
    }
    show();
  };
  const galleries = read("galleries-data");
  for (const place of document.querySelectorAll(".pictures")) browse(place, galleries[place.dataset.gallery]);
})();
