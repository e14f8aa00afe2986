'use strict';
/* A line chart: axes, a legend whose entries switch lines off and on, and a reading of all lines at one place. */

Latte.ticks = (low, high, wanted) => {
  const span = high - low || Math.abs(high) || 1;
  const raw = span / Math.max(1, wanted);
  const unit = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * unit).find((s) => s >= raw * 0.999) || 10 * unit;
  const result = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) result.push(+(i * step).toPrecision(12));
  return result;
};

Latte.logTicks = (low, high, wanted, base) => {
  if (base === 2) {
    const from = Math.ceil(Math.log2(low) - 1e-9);
    const to = Math.floor(Math.log2(high) + 1e-9);
    const every = Math.max(1, Math.ceil((to - from + 1) / wanted));
    const result = [];
    for (let e = from; e <= to; e += every) result.push(2 ** e);
    return result;
  }
  const decades = Math.log10(high / low);
  if (decades < 0.7) return Latte.ticks(low, high, wanted).filter((v) => v > 0);
  const steps = decades > wanted * 0.7 ? [1] : decades > wanted * 0.4 ? [1, 3] : [1, 2, 5];
  const result = [];
  for (let e = Math.floor(Math.log10(low)); e <= Math.ceil(Math.log10(high)); e++) {
    for (const s of steps) {
      const value = +(s * 10 ** e).toPrecision(3);
      if (value >= low * 0.999 && value <= high * 1.001) result.push(value);
    }
  }
  return result;
};

// Ticks carry no more decimals than tell them apart.
Latte.tickFormat = (name, ticks) => {
  if (name !== 'number') return Latte.formats[name];
  const decimals = Math.max(0, ...ticks.map((v) => (String(+v.toPrecision(8)).split('.')[1] || '').length));
  return (v) => v.toFixed(Math.min(decimals, 6));
};

const SHAPES = ['circle', 'square', 'diamond', 'triangle'];
const marker = (shape, x, y, r, attributes) => {
  if (shape === 'square') return Latte.svg('rect', { x: x - r * 0.9, y: y - r * 0.9, width: r * 1.8, height: r * 1.8, ...attributes });
  if (shape === 'diamond') return Latte.svg('path', { d: `M${x},${y - r * 1.3}l${r * 1.3},${r * 1.3}l${-r * 1.3},${r * 1.3}l${-r * 1.3},${-r * 1.3}z`, ...attributes });
  if (shape === 'triangle') return Latte.svg('path', { d: `M${x},${y - r * 1.2}l${r * 1.2},${r * 2.1}h${-r * 2.4}z`, ...attributes });
  return Latte.svg('circle', { cx: x, cy: y, r, ...attributes });
};

const nearest = (points, x) => {
  let best = null;
  for (const point of points) if (best === null || Math.abs(point[0] - x) < Math.abs(best[0] - x)) best = point;
  return best;
};

/* spec: { label, height, x: {label, reading, log, base, format}, y: {...}, series, marks: [{x, label}] }
   reading: what the tooltip says of a place, # its number
   series: { name, color (index), points: [[x, y]], faint: [[x, y]], dots, dash, group } */
Latte.lineChart = (holder, spec) => {
  const { el, svg } = Latte;
  const hidden = new Set();
  const plot = el('div', { class: 'plot', tabindex: 0, role: 'img', 'aria-label': spec.label });
  const xFormat = Latte.formats[spec.x.format || 'number'];
  const yFormat = Latte.formats[spec.y.format || 'number'];
  let reading = null; // the place that is read out, in units of x

  // Lines that differ only in what they show (training, validation) are switched together.
  const entries = [];
  for (const line of spec.series) {
    const key = line.group || line.name;
    if (!entries.some((entry) => entry.key === key)) entries.push({ key, color: line.color, dash: line.dash, dots: line.dots });
  }
  const legend = el('div', { class: 'legend', role: 'group', 'aria-label': 'Lines shown' }, entries.map((entry) =>
    el('button', {
      type: 'button', 'aria-pressed': 'true', class: 'legend-entry', style: { '--color': `var(--series-${entry.color % 8})` },
      onclick: (event) => {
        if (hidden.has(entry.key)) hidden.delete(entry.key);
        else if (hidden.size < entries.length - 1) hidden.add(entry.key);
        event.currentTarget.setAttribute('aria-pressed', String(!hidden.has(entry.key)));
        draw();
      },
    }, svg('svg', { width: 24, height: 12, 'aria-hidden': 'true' },
      svg('line', { x1: 1, x2: 23, y1: 6, y2: 6, class: 'line', 'stroke-dasharray': entry.dash || dashOf(entry.color) }),
      marker(SHAPES[entry.color % 4], 12, 6, 3, { class: 'dot' })), entry.key)));
  if (entries.length > 1) holder.append(legend);
  holder.append(plot);
  if (spec.note) holder.append(el('p', { class: 'key' }, spec.note));

  function dashOf(color) { return color >= 4 ? '5 3' : null; }

  function draw() {
    const width = Math.max(240, plot.clientWidth);
    const height = spec.height || Math.round(Math.min(340, Math.max(230, width * 0.56)));
    const shown = spec.series.filter((line) => !hidden.has(line.group || line.name) && line.points.length);
    const all = shown.flatMap((line) => line.points.concat(line.range ? line.faint : []));
    if (!all.length) return;
    const xs = all.map((p) => p[0]).concat((spec.marks || []).map((m) => m.x));
    const ys = all.map((p) => p[1]);
    let [x0, x1] = [Math.min(...xs), Math.max(...xs)];
    let [y0, y1] = [Math.min(...ys), Math.max(...ys)];
    if (x0 === x1) { x0 = spec.x.log ? x0 / 2 : x0 - 1; x1 = spec.x.log ? x1 * 2 : x1 + 1; }
    if (spec.y.zero) y0 = 0;
    if (spec.y.top) y1 = Math.max(y0, Math.min(y1, spec.y.top(shown))); // what stands higher is cut off at the frame
    if (spec.y.log) { const pad = Math.max(1.06, (y1 / y0) ** 0.06); y0 /= pad; y1 *= pad; } else {
      const pad = (y1 - y0 || Math.abs(y1) || 1) * 0.06;
      y0 = spec.y.zero ? 0 : y0 - pad;
      y1 += pad;
    }
    const yTicks = spec.y.log ? Latte.logTicks(y0, y1, height / 50, spec.y.base) : Latte.ticks(y0, y1, height / 55);
    const yName = Latte.tickFormat(spec.y.format || 'number', yTicks);
    const left = 14 + 6.6 * Math.max(...yTicks.map((v) => yName(v).length));
    const box = { left, right: width - 14, top: 26, bottom: height - 42 };
    const scale = (low, high, from, to, log) => {
      const t = log ? Math.log : (v) => v;
      return (v) => from + ((t(v) - t(low)) / (t(high) - t(low))) * (to - from);
    };
    const X = scale(x0, x1, box.left + 4, box.right - 4, spec.x.log);
    const Y = scale(y0, y1, box.bottom, box.top, spec.y.log);
    const xTicks = spec.x.log ? Latte.logTicks(x0, x1, width / 70, spec.x.base) : Latte.ticks(x0, x1, width / 95).filter((v) => spec.x.format !== 'integer' || Number.isInteger(v));

    const root = svg('svg', { width, height, viewBox: `0 0 ${width} ${height}`, 'aria-hidden': 'true' });
    for (const v of yTicks) {
      root.append(svg('line', { class: 'grid', x1: box.left, x2: box.right, y1: Y(v), y2: Y(v) }),
        svg('text', { class: 'tick', x: box.left - 7, y: Y(v) + 3.5, 'text-anchor': 'end' }, yName(v)));
    }
    for (const v of xTicks) {
      root.append(svg('line', { class: 'tickmark', x1: X(v), x2: X(v), y1: box.bottom, y2: box.bottom + 4 }),
        svg('text', { class: 'tick', x: X(v), y: box.bottom + 17, 'text-anchor': 'middle' }, xFormat(v)));
    }
    root.append(svg('line', { class: 'axis', x1: box.left, x2: box.right, y1: box.bottom, y2: box.bottom }),
      svg('text', { class: 'axis-name', x: box.right, y: height - 6, 'text-anchor': 'end' }, spec.x.label + ' →'),
      svg('text', { class: 'axis-name', x: 0, y: 12 }, '↑ ' + spec.y.label));
    const path = (points) => points.map((p, i) => `${i ? 'L' : 'M'}${X(p[0]).toFixed(1)},${Y(p[1]).toFixed(1)}`).join('');
    const clip = `clip-${Math.random().toString(36).slice(2)}`;
    root.append(svg('clipPath', { id: clip }, svg('rect', { x: box.left, y: box.top - 5, width: box.right - box.left, height: box.bottom - box.top + 10 })));
    const lines = svg('g', { 'clip-path': `url(#${clip})` });
    root.append(lines);
    for (const line of shown) {
      const style = { '--color': `var(--series-${line.color % 8})` };
      if (line.faint) lines.append(svg('path', { class: 'line faint', d: path(line.faint), style }));
      if (!line.bare) lines.append(svg('path', { class: 'line' + (line.thin ? ' thin' : ''), d: path(line.points), style, 'stroke-dasharray': line.dash || dashOf(line.color) }));
      if (line.dots || line.points.length === 1) for (const p of line.points) lines.append(marker(SHAPES[line.color % 4], X(p[0]), Y(p[1]), 3.4, { class: 'dot', style }));
    }
    for (const mark of spec.marks || []) {
      const toLeft = X(mark.x) > (box.left + box.right) / 2;
      root.append(svg('line', { class: 'mark', x1: X(mark.x), x2: X(mark.x), y1: box.top, y2: box.bottom }),
        svg('text', { class: 'mark-name', x: X(mark.x) + (toLeft ? -6 : 6), y: box.top + 9, 'text-anchor': toLeft ? 'end' : 'start' }, mark.label));
    }
    const cursor = svg('g', { class: 'cursor' });
    root.append(cursor);
    plot.replaceChildren(root);

    function read(place, clientX, clientY) {
      reading = place;
      const rows = [];
      cursor.replaceChildren(svg('line', { class: 'crosshair', x1: X(place), x2: X(place), y1: box.top, y2: box.bottom }));
      for (const line of shown) {
        const point = nearest(line.points, place);
        // A line that has nothing near this place does not answer for it.
        if (Math.abs(X(point[0]) - X(place)) > Math.max(28, (box.right - box.left) / line.points.length)) continue;
        const color = `var(--series-${line.color % 8})`;
        cursor.append(marker(SHAPES[line.color % 4], X(point[0]), Y(point[1]), 4.5, { class: 'dot', style: { '--color': color } }));
        rows.push(Latte.tipRow(color, line.name, yFormat(point[1])));
      }
      Latte.tip(clientX, clientY, el('div', { class: 'tip-title' }, (spec.x.reading || '# ' + spec.x.label).replace('#', xFormat(place))), rows);
    }
    const places = [...new Set(shown.flatMap((line) => line.points.map((p) => p[0])))].sort((a, b) => a - b);
    const placeAt = (pixel) => places.reduce((best, v) => (Math.abs(X(v) - pixel) < Math.abs(X(best) - pixel) ? v : best), places[0]);
    plot.onpointermove = (event) => {
      const at = event.clientX - plot.getBoundingClientRect().left;
      read(placeAt(at), event.clientX, event.clientY);
    };
    plot.onpointerleave = plot.onblur = () => { cursor.replaceChildren(); Latte.hideTip(); };
    plot.onkeydown = (event) => {
      const direction = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!direction) return;
      event.preventDefault();
      const at = reading === null ? (direction > 0 ? -1 : places.length) : places.indexOf(placeAt(X(reading)));
      const place = places[Math.max(0, Math.min(places.length - 1, at + direction))];
      const frame = plot.getBoundingClientRect();
      read(place, frame.left + X(place), frame.top + 30);
    };
  }
  new ResizeObserver(draw).observe(plot);
  draw();
  return { draw };
};
