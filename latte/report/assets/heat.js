'use strict';
/* Probabilities as pictures: a matrix on a canvas, and the paper's figure of p(l|t) for every layer and head. */

/* value(row, column) is a probability, or null where there is none (the future). With `apart`, the first row (the
   window's slot) is set apart from the others (the latents) by half a row. */
const TALL = 4; // pixels a row where a gap is needed, so that the gap can be half a row
Latte.heat = (canvas, rows, columns, value, apart = false) => {
  const tall = apart ? TALL : 1;
  const gap = apart ? TALL / 2 : 0;
  canvas.width = columns;
  canvas.height = rows * tall + gap;
  const draw = () => {
    const ramp = Latte.ramp();
    const context = canvas.getContext('2d');
    const image = context.createImageData(columns, canvas.height);
    for (let r = 0; r < rows; r++) {
      for (let c = 0; c < columns; c++) {
        const p = value(r, c);
        if (p === null) continue;
        const from = Latte.heatIndex(p) * 3;
        for (let y = r * tall + (r ? gap : 0), end = y + tall; y < end; y++) {
          const to = (y * columns + c) * 4;
          image.data[to] = ramp[from];
          image.data[to + 1] = ramp[from + 1];
          image.data[to + 2] = ramp[from + 2];
          image.data[to + 3] = 255;
        }
      }
    }
    context.putImageData(image, 0, 0);
  };
  draw();
  return draw;
};

// The cell under the pointer, the gap counted out.
Latte.cellAt = (canvas, event, rows, apart = false) => {
  const box = canvas.getBoundingClientRect();
  const column = Math.floor(((event.clientX - box.left) / box.width) * canvas.width);
  const y = ((event.clientY - box.top) / box.height) * canvas.height;
  const row = Math.floor(!apart ? y : y < TALL ? 0 : Math.max(1, (y - TALL / 2) / TALL));
  return [Math.max(0, Math.min(rows - 1, row)), Math.max(0, Math.min(canvas.width - 1, column))];
};

Latte.heatLegend = () => {
  const { el } = Latte;
  const canvas = el('canvas', { 'aria-hidden': 'true' });
  // The bar is the ramp itself; its numbers are squares, since colour goes with the square root.
  const draw = Latte.heat(canvas, 1, 128, (_, c) => (c / 127) ** 2);
  Latte.onTheme(draw);
  return el('div', { class: 'heat-legend' }, el('span', { class: 'heat-legend-name' }, 'probability'),
    el('div', {}, canvas, el('div', { class: 'heat-legend-ticks' },
      [0, 0.05, 0.25, 0.5, 1].map((p) => el('span', { style: { left: Math.sqrt(p) * 100 + '%' } }, String(p))))));
};

/* data: an inspection; stats[layer]: { use: [head][slot], entropy: [head], effective: [head], reach: [head][latent] } */
Latte.latentGrid = async (holder, data, stats, onPick) => {
  const { el } = Latte;
  const tokens = data.tokens;
  const draws = [];
  let among = false; // whether latents are shown as shares of what the window leaves them
  const scale = Latte.choice('Shares', [{ value: 'all', label: 'of all attention' }, { value: 'among', label: 'among latents' }], 'all',
    (value) => { among = value === 'among'; draws.forEach((draw) => draw()); });
  const windows = data.layers.some((layer) => layer.window);
  holder.replaceChildren(el('div', { class: 'heat-head' }, windows ? scale : el('span'), Latte.heatLegend()));
  for (const [index, layer] of data.layers.entries()) {
    if (!layer.slots) continue;
    const packed = await Latte.unpack(layer.slots);
    const [heads, length, slots] = packed.shape;
    const window = layer.window ? 1 : 0;
    const name = (slot) => (window && slot === 0 ? 'slot 0, the window' : `latent ${slot + 1 - window}`);
    const row = el('div', { class: 'heat-row' });
    holder.append(el('h4', { class: 'heat-layer' }, `Layer ${index + 1}`), row);
    for (let h = 0; h < heads; h++) {
      const value = (slot, t) => packed.values[(h * length + t) * slots + slot] / 65535;
      const drawn = (slot, t) => {
        const own = value(slot, t);
        return among && window && slot > 0 ? own / Math.max(1 - value(0, t), 1e-6) : own;
      };
      const use = stats[index].use[h];
      const canvas = el('canvas', { class: 'heat', role: 'img', 'aria-label': `p(l|t) of layer ${index + 1}, head ${h + 1}` });
      const apart = Boolean(window);
      draws.push(Latte.heat(canvas, slots, length, drawn, apart));
      Latte.onTheme(draws[draws.length - 1]);
      // The window's bar is its share of all; the latents' are relative to the most used of them.
      const most = Math.max(...use.slice(window));
      const bars = el('div', { class: 'use', 'aria-hidden': 'true' }, use.flatMap((share, slot) => {
        const bar = el('i', {
          class: window && slot === 0 ? 'window' : '', style: { '--share': slot < window ? share : share / most },
          onpointermove: (event) => Latte.tip(event.clientX, event.clientY,
            el('div', { class: 'tip-title' }, name(slot)),
            Latte.tipRow(null, 'mean share', Latte.percent(share)),
            slot >= window ? Latte.tipRow(null, 'reads about', `${Latte.round(stats[index].reach[h][slot - window], 3)} positions`) : []),
          onpointerleave: Latte.hideTip,
        });
        return slot === 0 && window ? [bar, el('i', { class: 'gap' })] : [bar];
      }));
      canvas.onpointermove = (event) => {
        const [slot, t] = Latte.cellAt(canvas, event, slots, apart);
        Latte.tip(event.clientX, event.clientY, el('div', { class: 'tip-title' }, `token ${t}  ${Latte.visible(tokens[t])}`),
          Latte.tipRow(null, name(slot), value(slot, t).toFixed(3)),
          among && slot >= window ? Latte.tipRow(null, 'among latents', drawn(slot, t).toFixed(3)) : []);
      };
      canvas.onpointerleave = Latte.hideTip;
      canvas.onclick = (event) => onPick && onPick(index, h, Latte.cellAt(canvas, event, slots, apart)[1]);
      const about = [`${Latte.round(stats[index].effective[h], 3)} of ${slots - window} in use`];
      if (window) about.push(`window ${Latte.percent(use[0])}`);
      row.append(el('figure', { class: 'heat-cell' },
        el('figcaption', {}, el('b', {}, `Head ${h + 1}`), el('span', {}, `entropy ${stats[index].entropy[h].toFixed(2)} bits`)),
        el('div', { class: 'heat-body' }, canvas, bars), el('p', { class: 'heat-about' }, about.join(' · '))));
    }
  }
};
