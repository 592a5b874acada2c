// Scrolls to `share` of the way down and returns what the viewport shows, boxes as x1, y1, x2, y2 in CSS pixels:
//   {frames, elements: [{label, boxes: [{whole, shown}]}]}, elements in the document's order.
// `whole` is a box as laid out, or one line of a link; `shown` is the part that window and scrolling boxes leave of it,
// null where less than half of that can be seen for what lies above. Pages run no script; this one is ours. Throws where
// the page has more elements than can be looked at in `milliseconds`.
([share, milliseconds]) => {
  const end = performance.now() + milliseconds;
  const BUTTON =
    "button, input[type=button], input[type=submit], input[type=reset], input[type=image], [role=button]";
  const LABELS = [
    // an element has the first one that fits
    ["button", BUTTON],
    ["field", "input:not([type=hidden]), select, textarea, [contenteditable]:not([contenteditable=false])"],
    ["image", "img, svg, canvas, video"],
    ["heading", "h1, h2, h3, h4, h5, h6, [role=heading]"],
    ["link", "a[href]"],
  ];
  const PAINTED = `${BUTTON}, input, select, textarea, img, svg, canvas, video`;
  const SAMPLES = 5; // points along each side of a box
  const root = document.documentElement;

  // Nothing moves, and what lies above an element is found as a pointer would find it.
  const style = document.createElement("style");
  style.textContent = `*, *::before, *::after {
    animation: none !important; transition: none !important; caret-color: transparent !important;
    pointer-events: auto !important; }`;
  root.append(style);

  const isVisible = (element) =>
    element.checkVisibility({ opacityProperty: true, visibilityProperty: true, contentVisibilityAuto: true });
  const around = (rects) => [
    Math.min(...rects.map((rect) => rect.left)),
    Math.min(...rects.map((rect) => rect.top)),
    Math.max(...rects.map((rect) => rect.right)),
    Math.max(...rects.map((rect) => rect.bottom)),
  ];
  const common = (a, b) => [
    Math.max(a[0], b[0]),
    Math.max(a[1], b[1]),
    Math.min(a[2], b[2]),
    Math.min(a[3], b[3]),
  ];
  const hasArea = (rect) => rect.width > 0 && rect.height > 0;

  // Lines of visible text in an element.
  const textRects = (element) => {
    const found = [];
    const walker = document.createTreeWalker(element, NodeFilter.SHOW_TEXT);
    for (let node = walker.nextNode(); node; node = walker.nextNode()) {
      if (!node.data.trim() || !isVisible(node.parentElement)) continue;
      const range = document.createRange();
      range.selectNodeContents(node);
      found.push(...[...range.getClientRects()].filter(hasArea));
    }
    return found;
  };

  // The boxes that a person would draw: one, but for a link in running text one per line.
  const boxesOf = (element, label) => {
    if (label === "heading") {
      const rects = textRects(element); // the element itself is as wide as its column
      return rects.length ? [around(rects)] : [];
    }
    if (label === "link") {
      if (!textRects(element).length) return []; // the picture in it has a label of its own
      const isInline = getComputedStyle(element).display === "inline";
      const hasBlock = [...element.querySelectorAll("*")].some(
        (each) => !getComputedStyle(each).display.match(/^(inline|none|contents)/),
      );
      if (isInline && !hasBlock) return [...element.getClientRects()].filter(hasArea).map((rect) => around([rect]));
    }
    if (element.matches("img") && !(element.complete && element.naturalWidth)) return [];
    return [around([element.getBoundingClientRect()])];
  };

  // What is left of a box once window and every ancestor that cuts off its overflow have cut it.
  const cut = (box, element) => {
    let left = common(box, [0, 0, window.innerWidth, window.innerHeight]);
    let position = getComputedStyle(element).position;
    for (let up = element.parentElement; up && up !== root && position !== "fixed"; up = up.parentElement) {
      const style = getComputedStyle(up);
      if (position === "absolute" && style.position === "static" && style.transform === "none") continue;
      position = style.position;
      if (up === document.body) continue; // its overflow is the window's
      const rect = up.getBoundingClientRect();
      const across = style.overflowX !== "visible" ? [rect.left, rect.right] : [-Infinity, Infinity];
      const down = style.overflowY !== "visible" ? [rect.top, rect.bottom] : [-Infinity, Infinity];
      if (style.display !== "inline") left = common(left, [across[0], down[0], across[1], down[1]]);
    }
    return left;
  };

  const hides = (element) => {
    const style = getComputedStyle(element);
    const alpha = /^rgba|\//.test(style.backgroundColor) ? parseFloat(style.backgroundColor.match(/([\d.]+)\)$/)[1]) : 1;
    return isVisible(element) && (alpha > 0.5 || style.backgroundImage !== "none" || element.matches(PAINTED));
  };
  const isSeenAt = (element, x, y) => {
    for (const above of document.elementsFromPoint(x, y)) {
      if (element.contains(above)) return true;
      if (hides(above)) return false;
    }
    return false;
  };
  const isSeen = (element, box) => {
    let seen = 0;
    for (let row = 0.5; row < SAMPLES; row++) {
      for (let column = 0.5; column < SAMPLES; column++) {
        const x = box[0] + (column / SAMPLES) * (box[2] - box[0]);
        const y = box[1] + (row / SAMPLES) * (box[3] - box[1]);
        seen += isSeenAt(element, x, y);
      }
    }
    return 2 * seen >= SAMPLES * SAMPLES;
  };

  const furthest = (document.scrollingElement ?? root).scrollHeight - window.innerHeight;
  // A multiple of four is a whole number of pixels at every zoom in quarters.
  window.scrollTo({ top: 4 * Math.floor((share * Math.max(furthest, 0)) / 4), behavior: "instant" });
  const inWindow = (box) => box[0] < box[2] && box[1] < box[3];
  const elements = [];
  for (const element of document.querySelectorAll(LABELS.map(([, selector]) => selector).join())) {
    if (performance.now() > end) throw new Error(`its elements must be found in ${milliseconds / 1000} s`);
    if (!isVisible(element) || element.parentElement.closest(`${BUTTON}, svg`)) continue;
    const [label] = LABELS.find(([, selector]) => element.matches(selector));
    const boxes = [];
    for (const whole of boxesOf(element, label)) {
      const shown = cut(whole, element);
      if (inWindow(shown)) boxes.push({ whole, shown: isSeen(element, shown) ? shown : null });
    }
    if (boxes.length) elements.push({ label, boxes });
  }
  const frames = [...document.querySelectorAll("iframe, frame, object, embed")].some(
    (element) => isVisible(element) && inWindow(cut(around([element.getBoundingClientRect()]), element)),
  );
  return { frames, elements };
}
