'use strict';
/* Choose a token and see which positions it attends to: how much through the window, how much through each latent. */

/* One layer, unpacked. Latent layers come as their factors, and the sum is made here as the paper writes it:
   p(s|t) = p(0|t) p_0(s|t) + sum_l p(l|t) p(s|l,t),   p(s|l,t) = softmax of k_sl over the s that t may see. */
class LayerWeights {
  constructor(layer, length) {
    this.layer = layer;
    this.length = length;
    this.window = layer.window ? 1 : 0;
    this.slotCount = layer.slots ? layer.slots.shape[2] : 0;
  }

  static async open(layer, length) {
    for (const part of ['weights', 'slots', 'keys', 'window']) if (layer[part]) await Latte.unpack(layer[part]);
    return new LayerWeights(layer, length);
  }

  end(t) { return this.layer.causal ? t + 1 : this.length; }

  // p(l|t) over all slots.
  slots(head, t) {
    if (!this.slotCount) return null;
    const from = (head * this.length + t) * this.slotCount;
    return Array.from(this.layer.slots.values.subarray(from, from + this.slotCount), (v) => v / 65535);
  }

  // p(s|l,t), the latent counted without the window.
  reads(head, latent, t) {
    const latents = this.slotCount - this.window;
    const step = this.layer.steps[head][latent];
    const from = (head * latents + latent) * this.length;
    const keys = this.layer.keys.values.subarray(from, from + this.end(t));
    let top = 0;
    for (const key of keys) if (key > top) top = key;
    const result = new Float64Array(this.length);
    let sum = 0;
    for (let s = 0; s < keys.length; s++) sum += result[s] = Math.exp((keys[s] - top) * step);
    for (let s = 0; s < keys.length; s++) result[s] /= sum;
    return result;
  }

  matrixRow(matrix, head, t) {
    const from = (head * this.length + t) * this.length;
    return Float64Array.from(matrix.values.subarray(from, from + this.length), (v) => v / 65535);
  }

  // What token t takes from every position: in all, through the window, and through the latents.
  look(head, t) {
    const none = () => new Float64Array(this.length);
    const slots = this.slots(head, t);
    if (!slots) return { slots, window: none(), latents: none(), total: this.matrixRow(this.layer.weights, head, t) };
    const window = this.window ? this.matrixRow(this.layer.window, head, t).map((p) => p * slots[0]) : none();
    const latents = none();
    for (let l = 0; l < this.slotCount - this.window; l++) {
      const share = slots[l + this.window];
      if (share > 0) this.reads(head, l, t).forEach((p, s) => { latents[s] += share * p; });
    }
    return { slots, window, latents, total: window.map((p, s) => p + latents[s]) };
  }
}

Latte.inspector = (holder, data) => {
  const { el } = Latte;
  const tokens = data.tokens;
  const T = tokens.length;
  const usable = data.layers.map((layer, index) => index).filter((index) => data.layers[index].heads);
  if (data.reason || !usable.length) {
    holder.append(el('p', { class: 'nothing' }, `For this model ${data.reason || 'there is nothing to show'}.`));
    return { choose: () => {} };
  }
  const state = { ...data.start, part: 'all', slot: null };
  let weights = null;
  let seen = null;

  /* ---- the text ---- */
  const spans = tokens.map((token, index) => {
    const special = /^<\|?[^<>\s]+\|?>$/.test(token);
    const content = special ? el('small', {}, token.replace(/^<\|?|\|?>$/g, '')) : token.split(/(\n)/).map((piece) =>
      (piece === '\n' ? [el('i', { class: 'newline', 'aria-hidden': 'true' }, '⏎'), '\n'] : piece));
    return el('span', { class: 'token' + (special ? ' special' : ''), role: 'option', tabindex: -1, 'data-index': index, 'aria-selected': 'false' }, content);
  });
  const text = el('div', { class: 'tokens', role: 'listbox', 'aria-label': 'The text; arrow keys move the chosen token' }, spans);
  const chosenSpan = () => spans[state.token];
  const at = (event) => {
    const span = event.target.closest('.token');
    return span ? Number(span.dataset.index) : null;
  };
  text.addEventListener('click', (event) => { const index = at(event); if (index !== null) choose({ token: index }, chosenSpan); });
  text.addEventListener('pointermove', (event) => {
    const index = at(event);
    if (index === null || !seen) { Latte.hideTip(); return; }
    const rows = [Latte.tipRow(null, state.slot === null ? 'weight' : 'p(s|l,t)', shown()[index].toFixed(4))];
    if (weights.slotCount && state.slot === null) {
      if (weights.window) rows.push(Latte.tipRow('var(--window)', 'window', seen.window[index].toFixed(4)));
      rows.push(Latte.tipRow('var(--latent)', 'latents', seen.latents[index].toFixed(4)));
    }
    Latte.tip(event.clientX, event.clientY, el('div', { class: 'tip-title' }, `position ${index}  ${Latte.visible(tokens[index])}`), rows);
  });
  text.addEventListener('pointerleave', Latte.hideTip);
  text.addEventListener('keydown', (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    let token = null;
    if (step) token = state.token + step;
    else if (event.key === 'Home') token = 0;
    else if (event.key === 'End') token = T - 1;
    else if (event.key === 'ArrowUp' || event.key === 'ArrowDown') token = lineAway(event.key === 'ArrowUp' ? -1 : 1);
    else if (event.key === 'Escape') { choose({ slot: null }); return; }
    if (token === null) return;
    event.preventDefault();
    choose({ token: Math.max(0, Math.min(T - 1, token)) }, chosenSpan);
  });

  // The token in the line above or below that stands nearest to the chosen one.
  function lineAway(direction) {
    const here = spans[state.token].getClientRects()[0];
    let best = state.token;
    let bestLine = null;
    let bestGap = Infinity;
    for (let i = state.token + direction; i >= 0 && i < T; i += direction) {
      const box = spans[i].getClientRects()[0];
      if (!box || Math.abs(box.top - here.top) < here.height / 2) continue;
      if (bestLine === null) bestLine = box.top;
      if (Math.abs(box.top - bestLine) > here.height / 2) break;
      const gap = Math.abs(box.left - here.left);
      if (gap < bestGap) { best = i; bestGap = gap; }
    }
    return best;
  }

  /* ---- controls ---- */
  const controls = el('div', { class: 'controls' });
  const layerChoice = Latte.choice('Layer', data.layers.map((layer, index) => ({
    value: String(index), label: String(index + 1), disabled: !layer.heads,
    title: layer.heads ? layer.mixer : `${layer.mixer} has no weights to show`,
  })), String(state.layer), (value) => choose({ layer: Number(value), slot: null }));
  let headChoice = null;
  let partChoice = null;
  function drawControls() {
    headChoice = Latte.choice('Head', Array.from({ length: data.layers[state.layer].heads }, (_, h) => ({ value: String(h), label: String(h + 1) })),
      String(state.head), (value) => choose({ head: Number(value), slot: null }));
    partChoice = weights.window ? Latte.choice('Show', [
      { value: 'all', label: 'all' }, { value: 'window', label: 'window' }, { value: 'latents', label: 'latents' },
    ], state.part, (value) => choose({ part: value, slot: null })) : null;
    controls.replaceChildren(layerChoice, headChoice, ...(partChoice ? [partChoice] : []));
  }

  /* ---- the panel beside the text ---- */
  const panel = el('div', { class: 'panel', 'aria-live': 'polite' });
  const table = el('tbody');
  const tableFoot = el('tfoot');
  const details = el('details', { class: 'all-weights', ontoggle: () => drawTable() },
    el('summary', {}, 'All weights as a table'),
    el('div', { class: 'scroll' }, el('table', { class: 'numbers' }, el('thead', {}, el('tr', {},
      ['position', 'token', 'window', 'latents', 'weight'].map((name) => el('th', { scope: 'col' }, name)))), table, tableFoot)));

  const maps = el('div', { class: 'maps' });
  holder.append(controls, el('div', { class: 'inspect' },
    el('div', { class: 'inspect-text' }, text, el('p', { class: 'sum-line' }, el('output', { class: 'sum' }))), panel), maps, details);

  // The distribution that shades the text now.
  function shown() {
    if (state.slot !== null) {
      if (weights.window && state.slot === 0) return weights.matrixRow(weights.layer.window, state.head, state.token);
      return weights.reads(state.head, state.slot - weights.window, state.token);
    }
    return { all: seen.total, window: seen.window, latents: seen.latents }[state.part];
  }

  // How much of what is shown at a position is looked at directly and not through latents: all, where there are none.
  function directShare(s) {
    if (!weights.slotCount) return 1;
    if (!weights.window) return 0;
    if (state.slot !== null) return state.slot === 0 ? 1 : 0;
    return seen.total[s] > 0 ? seen.window[s] / seen.total[s] : 0;
  }

  function drawText() {
    const values = shown();
    const top = Math.max(...values, 1e-9);
    const end = weights.end(state.token);
    let sum = 0;
    spans.forEach((span, s) => {
      const value = values[s];
      sum += value;
      // The two hues say where it comes from, their strength how much.
      span.style.setProperty('--share', directShare(s).toFixed(3));
      span.style.setProperty('--strength', s < end ? ((value / top) ** 0.85).toFixed(3) : '0');
      span.dataset.weight = value.toFixed(7);
      span.classList.toggle('future', s >= end);
      const chosen = s === state.token;
      span.classList.toggle('chosen', chosen);
      span.setAttribute('aria-selected', String(chosen));
      span.tabIndex = chosen ? 0 : -1;
      span.setAttribute('aria-label', `${Latte.visible(tokens[s])}, position ${s}, weight ${value.toFixed(3)}`);
    });
    const what = state.slot !== null
      ? (weights.window && state.slot === 0 ? 'p₀(s|t), what the window reads' : `p(s|l,t), what latent ${state.slot + 1 - weights.window} reads`)
      : { all: weights.layer.signed ? '|w(t,s)|, each token’s share of the absolute weights' : 'p(s|t)', window: 'the window’s part, p(0|t) p₀(s|t)', latents: 'the latents’ part, Σ p(l|t) p(s|l,t)' }[state.part];
    const output = holder.querySelector('.sum');
    output.dataset.sum = sum.toFixed(6);
    output.textContent = `Shaded: ${what}; over all positions it sums to ${sum.toFixed(3)}.`;
  }

  function chip(index) {
    return el('code', { class: 'chip' }, Latte.visible(tokens[index]));
  }

  function drawPanel() {
    const t = state.token;
    const parts = [el('h4', {}, `Token ${t} `, chip(t))];
    if (data.surprise && t > 0) parts.push(el('p', { class: 'quiet' }, `It came as a surprise of ${data.surprise[t].toFixed(1)} bits.`));
    if (weights.window) {
      const near = seen.slots[0];
      parts.push(el('div', { class: 'split', role: 'img', 'aria-label': `window ${Latte.percent(near)}, latents ${Latte.percent(1 - near)}` },
        el('i', { class: 'window', style: { flex: near } }), el('i', { class: 'latent', style: { flex: 1 - near } })),
      el('div', { class: 'split-names' }, el('span', {}, el('i', { class: 'swatch', style: { background: 'var(--window)' } }), 'window ', el('b', { class: 'window-share' }, Latte.percent(near))),
        el('span', {}, el('i', { class: 'swatch', style: { background: 'var(--latent)' } }), 'latents ', el('b', {}, Latte.percent(1 - near)))));
    }
    if (seen.slots) {
      const top = Math.max(...seen.slots);
      parts.push(el('h5', {}, 'Through what it looks, p(l|t)'),
        el('div', { class: 'slots', role: 'group', 'aria-label': 'Slots; choose one to see what it reads' }, seen.slots.map((share, slot) => {
          const name = weights.window && slot === 0 ? 'window' : `latent ${slot + 1 - weights.window}`;
          return el('button', {
            type: 'button', class: 'slot' + (weights.window && slot === 0 ? ' window' : ''), 'data-slot': slot, 'data-share': share.toFixed(6),
            'aria-pressed': String(state.slot === slot), 'aria-label': `${name}, ${share.toFixed(3)}`,
            onclick: () => choose({ slot: state.slot === slot ? null : slot }, () => panel.querySelector(`[data-slot="${slot}"]`)),
            onpointermove: (event) => Latte.tip(event.clientX, event.clientY, Latte.tipRow(null, name, share.toFixed(4))),
            onpointerleave: Latte.hideTip,
          }, el('i', { style: { height: `${(share / top) * 100}%` } }));
        })),
        el('p', { class: 'quiet' }, state.slot === null ? 'Choose a bar to see what it reads.'
          : `${weights.window && state.slot === 0 ? 'The window' : `Latent ${state.slot + 1 - weights.window}`} carries ${Latte.percent(seen.slots[state.slot])} of this token.`));
    }
    const values = shown();
    const order = Array.from(values.keys()).sort((a, b) => values[b] - values[a]).slice(0, 8).filter((s, rank) => rank === 0 || values[s] >= 0.0005);
    const top = values[order[0]] || 1;
    parts.push(el('h5', {}, 'Where it looks'), el('ol', { class: 'top' }, order.map((s) => {
      const near = directShare(s);
      return el('li', {}, el('button', { type: 'button', onclick: () => choose({ token: s }, chosenSpan), 'aria-label': `position ${s}, ${values[s].toFixed(3)}; choose this token` },
        el('span', { class: 'place' }, s === t ? 'itself' : s < t ? `−${t - s}` : `+${s - t}`), chip(s),
        el('span', { class: 'bar' }, el('i', { class: 'window', style: { width: `${(values[s] / top) * near * 100}%` } }), el('i', { class: 'latent', style: { width: `${(values[s] / top) * (1 - near) * 100}%` } })),
        el('span', { class: 'value' }, values[s].toFixed(3))));
    })));
    panel.replaceChildren(...parts);
  }

  function drawTable() {
    if (!details.open || !seen) return;
    const split = Boolean(weights.slotCount);
    details.classList.toggle('plain', !split);
    const row = (s) => el('tr', {}, el('td', {}, String(s)), el('td', {}, chip(s)), el('td', {}, split ? seen.window[s].toFixed(5) : '–'),
      el('td', {}, split ? seen.latents[s].toFixed(5) : '–'), el('td', {}, seen.total[s].toFixed(5)));
    table.replaceChildren(...Array.from({ length: weights.end(state.token) }, (_, s) => row(s)));
    const sum = (values) => values.reduce((a, b) => a + b, 0).toFixed(5);
    tableFoot.replaceChildren(el('tr', {}, el('td', { colspan: 2 }, 'sum'), el('td', {}, split ? sum(seen.window) : '–'), el('td', {}, split ? sum(seen.latents) : '–'), el('td', {}, sum(seen.total))));
  }

  /* ---- the whole head: every token at once ---- */
  let mapOf = null;
  let mapDraws = [];
  function drawMaps() {
    const key = `${state.layer}/${state.head}`;
    if (mapOf !== key) {
      mapOf = key;
      const rows = Array.from({ length: T }, (_, t) => weights.look(state.head, t));
      const square = el('canvas', { class: 'heat square', role: 'img', 'aria-label': 'p(s|t) of all tokens' });
      // Each row by its own largest: otherwise long texts, whose weights are small, would all look pale.
      const tops = rows.map((row) => Math.max(...row.total, 1e-9));
      mapDraws = [Latte.heat(square, T, T, (t, s) => (s < weights.end(t) ? rows[t].total[s] / tops[t] : null))];
      square.onclick = (event) => choose({ token: Latte.cellAt(square, event, T)[0] });
      square.onpointermove = (event) => {
        const [t, s] = Latte.cellAt(square, event, T);
        if (s >= weights.end(t)) { Latte.hideTip(); return; }
        Latte.tip(event.clientX, event.clientY, Latte.tipRow(null, `${t} ${Latte.visible(tokens[t])} → ${s} ${Latte.visible(tokens[s])}`, rows[t].total[s].toFixed(4)));
      };
      square.onpointerleave = Latte.hideTip;
      const figures = [el('figure', {}, el('figcaption', {}, el('b', {}, 'p(s|t)'), ' every token (down) and where it looks (across), each row by its largest'),
        el('div', { class: 'map-frame' }, square, el('i', { class: 'guide across' })))];
      if (weights.slotCount) {
        const apart = Boolean(weights.window);
        const strip = el('canvas', { class: 'heat strip', role: 'img', 'aria-label': 'p(l|t) of all tokens' });
        mapDraws.push(Latte.heat(strip, weights.slotCount, T, (slot, t) => rows[t].slots[slot], apart));
        strip.onclick = (event) => choose({ token: Latte.cellAt(strip, event, weights.slotCount, apart)[1] });
        strip.onpointermove = (event) => {
          const [slot, t] = Latte.cellAt(strip, event, weights.slotCount, apart);
          Latte.tip(event.clientX, event.clientY, el('div', { class: 'tip-title' }, `token ${t}  ${Latte.visible(tokens[t])}`),
            Latte.tipRow(null, weights.window && !slot ? 'window' : `latent ${slot + 1 - weights.window}`, rows[t].slots[slot].toFixed(4)));
        };
        strip.onpointerleave = Latte.hideTip;
        figures.push(el('figure', {}, el('figcaption', {}, el('b', {}, 'p(l|t)'), weights.window ? ' the window (top) and each latent (down), for every token (across)' : ' each latent (down), for every token (across)'),
          el('div', { class: 'map-frame' }, strip, el('i', { class: 'guide down' })), Latte.heatLegend()));
      }
      maps.replaceChildren(...figures);
    }
    for (const guide of maps.querySelectorAll('.guide')) guide.style.setProperty('--at', `${((state.token + 0.5) / T) * 100}%`);
  }
  Latte.onTheme(() => mapDraws.forEach((draw) => draw()));

  let asked = 0;
  async function choose(change, focus) {
    const layerChanged = change.layer !== undefined && change.layer !== state.layer;
    Object.assign(state, change);
    const turn = ++asked;
    if (layerChanged || !weights) {
      const opened = await LayerWeights.open(data.layers[state.layer], T);
      if (turn !== asked) return;
      weights = opened;
      state.head = Math.min(state.head, data.layers[state.layer].heads - 1);
      if (!weights.window) state.part = 'all';
      drawControls();
    }
    layerChoice.choose(state.layer);
    headChoice.choose(state.head);
    if (partChoice) partChoice.choose(state.part);
    seen = weights.look(state.head, state.token);
    drawText();
    drawPanel();
    drawTable();
    drawMaps();
    holder.dataset.layer = state.layer;
    holder.dataset.head = state.head;
    holder.dataset.token = state.token;
    const span = spans[state.token];
    const offset = span.offsetTop; // the text scrolls to its token, the page does not
    if (offset < text.scrollTop || offset + span.offsetHeight > text.scrollTop + text.clientHeight) text.scrollTop = offset - text.clientHeight / 2;
    if (focus) focus().focus({ preventScroll: true }); // what was pressed has been drawn anew
  }
  choose({});
  return { choose };
};
