'use strict';
/* Shared by every figure: elements, numbers, embedded arrays, colours, and one tooltip. */
const Latte = {};

/* ---- elements ---- */

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith('on')) node.addEventListener(name.slice(2), value);
    else if (name === 'class') node.setAttribute('class', value);
    else if (name === 'style' && typeof value === 'object') {
      for (const [key, entry] of Object.entries(value)) node.style.setProperty(key, entry);
    } else node.setAttribute(name, value === true ? '' : value);
  }
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    node.append(child);
  }
  return node;
}

Latte.el = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);

// The parser knows SVG's namespace, so no address has to stand in this file.
const SVG_NAMESPACE = (() => {
  const holder = document.createElement('div');
  holder.innerHTML = '<svg></svg>';
  return holder.firstChild.namespaceURI;
})();
Latte.svg = (tag, attributes, ...children) =>
  fill(document.createElementNS(SVG_NAMESPACE, tag), attributes, children);

Latte.data = (id) => {
  const node = document.getElementById(id);
  return node ? JSON.parse(node.textContent) : null;
};

/* ---- numbers ---- */

Latte.round = (value, digits = 3) => {
  if (value === null || value === undefined || !Number.isFinite(value)) return '–';
  if (value === 0) return '0';
  const size = Math.abs(value);
  if (size >= 1e5) return Latte.count(value);
  if (size >= 1000) return Math.round(value).toLocaleString('en');
  const places = Math.max(0, digits - 1 - Math.floor(Math.log10(size)));
  return value.toFixed(Math.min(places, 6));
};

Latte.count = (value) => {
  const size = Math.abs(value);
  for (const [limit, unit] of [[1e9, 'B'], [1e6, 'M'], [1e3, 'k']]) {
    if (size >= limit) {
      const scaled = value / limit;
      return scaled.toFixed(Math.abs(scaled) >= 100 ? 0 : 1).replace(/\.0$/, '') + unit;
    }
  }
  return String(Math.round(value * 1000) / 1000);
};

// Lengths of contexts are powers of two, so that 4096 reads 4k and not 4.1k.
Latte.length = (value) => {
  for (const [limit, unit] of [[1 << 20, 'M'], [1 << 10, 'k']]) {
    if (value >= limit && value % (limit / 4) === 0) return value / limit + unit;
  }
  return value.toLocaleString('en');
};

Latte.bytes = (value) => {
  const size = Math.abs(value);
  for (const [limit, unit] of [[2 ** 30, 'GiB'], [2 ** 20, 'MiB'], [2 ** 10, 'KiB']]) {
    if (size >= limit) return (value / limit).toFixed(size / limit >= 100 ? 0 : 1).replace(/\.0$/, '') + ' ' + unit;
  }
  return value + ' B';
};

Latte.percent = (share) => (share * 100).toFixed(Math.abs(share) >= 0.0995 || share === 0 ? 0 : 1).replace('-', '−') + '%';

Latte.formats = {
  number: (value) => Latte.round(value, 4),
  integer: (value) => Math.round(value).toLocaleString('en'),
  count: Latte.count,
  length: Latte.length,
  bytes: Latte.bytes,
  rate: (value) => (value >= 1000 ? Latte.count(value) : String(+value.toPrecision(3))),
  percent: Latte.percent,
};

// Names whitespace, since a token may be nothing else.
Latte.visible = (token) => {
  if (token === '') return '∅';
  return token.replace(/\n/g, '⏎').replace(/\t/g, '⇥').replace(/ /g, '·').replace(/\r/g, '␍');
};

/* ---- embedded arrays: base64 of deflated bytes, all high bytes before all low bytes ---- */

Latte.unpack = async (packed) => {
  if (packed.values) return packed;
  const text = atob(packed.data);
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream('deflate'));
  const planes = new Uint8Array(await new Response(stream).arrayBuffer());
  const size = planes.length / 2;
  const values = new Uint16Array(size);
  for (let i = 0; i < size; i++) values[i] = (planes[i] << 8) | planes[size + i];
  packed.values = values;
  packed.data = null;
  return packed;
};

/* ---- colours ---- */

const probe = Latte.el('span', { hidden: true });
document.documentElement.append(probe);

// What a custom property comes to under the present colour scheme, as [r, g, b].
Latte.color = (name) => {
  probe.style.color = `var(${name})`;
  return getComputedStyle(probe).color.match(/[\d.]+/g).slice(0, 3).map(Number);
};

// Interpolated in linear light, so that the ramp brightens evenly; 256 entries of [r, g, b].
Latte.ramp = () => {
  const linear = (c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
  const encoded = (c) => (c <= 0.0031308 ? c * 12.92 : 1.055 * c ** (1 / 2.4) - 0.055);
  const stops = [0, 1, 2, 3, 4].map((i) => Latte.color(`--heat-${i}`).map((c) => Math.cbrt(linear(c / 255))));
  const table = new Uint8Array(256 * 3);
  for (let i = 0; i < 256; i++) {
    const at = (i / 255) * (stops.length - 1);
    const k = Math.min(Math.floor(at), stops.length - 2);
    for (let c = 0; c < 3; c++) {
      const value = stops[k][c] + (stops[k + 1][c] - stops[k][c]) * (at - k);
      table[i * 3 + c] = Math.round(encoded(value ** 3) * 255);
    }
  }
  return table;
};

// Small shares matter as much as large ones: the ramp shows the square root of p.
Latte.heatIndex = (p) => Math.min(255, Math.round(Math.sqrt(Math.max(0, p)) * 255));

const redraws = new Set();
Latte.onTheme = (draw) => redraws.add(draw);
Latte.redraw = () => redraws.forEach((draw) => draw());
matchMedia('(prefers-color-scheme: dark)').addEventListener('change', Latte.redraw);
matchMedia('print').addEventListener('change', Latte.redraw);

Latte.themeButton = (button) => {
  const modes = ['auto', 'light', 'dark'];
  let mode = 0;
  const show = () => {
    document.documentElement.style.colorScheme = modes[mode] === 'auto' ? '' : modes[mode];
    button.textContent = { auto: '◐', light: '○', dark: '●' }[modes[mode]];
    button.setAttribute('aria-label', `Colours: ${modes[mode]}. Press to change.`);
    button.title = `Colours: ${modes[mode]}`;
    Latte.redraw();
  };
  button.addEventListener('click', () => { mode = (mode + 1) % 3; show(); });
  show();
};

/* ---- one tooltip for the page ---- */

const tip = Latte.el('div', { class: 'tip', role: 'status', hidden: true });
document.body.append(tip);

Latte.tip = (x, y, ...content) => {
  tip.replaceChildren(...content.flat(Infinity));
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const margin = 14;
  const left = x + margin + box.width > innerWidth - 6 ? x - margin - box.width : x + margin;
  tip.style.left = Math.max(6, left) + 'px';
  tip.style.top = Math.max(6, Math.min(y + margin, innerHeight - box.height - 6)) + 'px';
};
Latte.hideTip = () => { tip.hidden = true; };
addEventListener('scroll', Latte.hideTip, { passive: true });

Latte.tipRow = (color, name, value) =>
  Latte.el('div', { class: 'tip-row' },
    color && Latte.el('i', { class: 'swatch', style: { background: color } }),
    Latte.el('span', {}, name), Latte.el('b', {}, value));

/* ---- a group of choices, natively reachable by keyboard ---- */

let groups = 0;
Latte.choice = (label, options, chosen, onChange) => {
  const name = `choice-${++groups}`;
  const inputs = [];
  const row = Latte.el('fieldset', { class: 'choice' }, Latte.el('legend', {}, label),
    Latte.el('div', { class: 'choice-row' }, options.map((option, index) => {
      const input = Latte.el('input', {
        type: 'radio', name, id: `${name}-${index}`, value: option.value, disabled: option.disabled,
        onchange: () => onChange(option.value),
      });
      input.checked = option.value === chosen;
      inputs.push(input);
      return [input, Latte.el('label', { for: `${name}-${index}`, title: option.title }, option.label)];
    })));
  row.choose = (value) => inputs.forEach((input) => { input.checked = input.value === String(value); });
  return row;
};

/* ---- a page in sections, with a list of contents and numbered figures ---- */

Latte.outline = (page, facts) => {
  const { el } = Latte;
  const links = [];
  let figures = 0;
  if (facts.length) {
    page.append(el('dl', { class: 'facts' }, facts.map(([name, value]) => el('div', {}, el('dt', {}, name), el('dd', {}, value)))));
  }
  const contents = el('nav', { class: 'contents', 'aria-label': 'Contents' });
  page.append(contents);
  return {
    section(id, title, intro, short) {
      const node = el('section', { id }, el('h2', {}, title), intro && el('p', { class: 'intro' }, intro));
      page.append(node);
      links.push(el('a', { href: `#${id}` }, short || title));
      return node;
    },
    number: () => el('b', {}, `Figure ${++figures}. `),
    figure(title, caption) {
      const body = el('div');
      const node = el('figure', { class: 'card' }, el('h3', {}, title), body, el('figcaption', {}, this.number(), caption));
      return { node, body };
    },
    finish: () => contents.append(...links),
  };
};
