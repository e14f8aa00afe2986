'use strict';
/* The page of `latte extend`: what an extended model keeps of the pretrained one, and what it gains. */
(() => {
  const { el } = Latte;
  const data = Latte.data('data');
  const outline = Latte.outline(document.getElementById('page'), data.facts);
  const { texts } = data;
  const several = texts.length > 1;
  Latte.themeButton(document.querySelector('.theme'));

  const perplexity = (value) => (value >= 1e6 ? value.toExponential(1).replace('e+', 'e') : Latte.round(value, 4));
  // Axes and readings carry no more digits than they need.
  Latte.formats.perplexity = (value) => (value >= 1000 ? perplexity(value) : String(+value.toPrecision(4)));
  Latte.formats.small = (value) => String(+value.toPrecision(3));
  Latte.formats.milliseconds = (value) => `${+value.toPrecision(3)} ms`;
  const orDash = (value, format) => (value === null || value === undefined ? '–' : format(value));
  const swatch = (color) => el('i', { class: 'swatch', style: { background: `var(--series-${color % 8})` } });
  const length = { label: 'context, tokens', reading: '# tokens of context', log: true, base: 2, format: 'length' };

  function chart(body, found, spec) {
    const lines = found.lines.map((line) => ({ dots: spec.dots !== false, dash: spec.dash && spec.dash(line), ...line }));
    const places = lines.flatMap((line) => line.points.map((point) => point[0]));
    const marked = data.own && spec.x.log && data.own >= Math.min(...places) && data.own <= Math.max(...places);
    const steady = (shown) => shown.some((line) => data.steady.includes(line.name));
    Latte.lineChart(body, {
      ...spec,
      y: { ...spec.y, top: found.top === null ? undefined : (shown) => (steady(shown) ? found.top : Infinity) },
      series: lines,
      marks: marked ? [{ x: data.own, label: `made for ${Latte.length(data.own)}` }] : [],
      note: found.note,
    });
  }

  function card(holder, title, caption) {
    const { node, body } = outline.figure(title, caption);
    holder.append(node);
    return body;
  }

  const table = (head, rows, kind) => el('div', { class: 'scroll', tabindex: 0 }, el('table', { class: kind },
    el('thead', {}, el('tr', {}, head.map((name) => el('th', { scope: 'col' }, name)))),
    el('tbody', {}, rows)));

  /* ---- result ---- */
  const measured = texts.filter((text) => text.rows.length);
  const contenders = data.contenders.filter(({ name }) => measured.some((text) => text.rows.some((row) => row.contender === name)));
  if (measured.length) {
    const node = outline.section('results', 'Perplexity', 'How many tokens the next one is chosen among, as it seems to the model: lower is better. A dash stands where a model was not given so much.', 'Perplexity');
    const closed = measured.some((text) => text.closed.length);
    const rows = measured.flatMap((text) => {
      const contexts = [...new Set(text.rows.map((row) => row.context))].sort((a, b) => a - b);
      const group = several && el('tr', { class: 'group' }, el('th', { scope: 'rowgroup', colspan: contenders.length + 1 + closed }, text.name));
      return [group, contexts.map((context) => {
        const values = contenders.map(({ name }) => text.rows.find((row) => row.contender === name && row.context === context)?.perplexity);
        const best = Math.min(...values.filter((value) => Number.isFinite(value)));
        const share = (text.closed.find(([at]) => at === context) || [])[1];
        return el('tr', {}, el('td', {}, context.toLocaleString('en')),
          values.map((value) => el('td', { class: value === best && contenders.length > 1 ? 'best' : '' }, orDash(value, perplexity))),
          closed && el('td', {}, orDash(share, Latte.percent)));
      })];
    });
    const head = ['context, tokens', ...contenders.map(({ name, color }) => [swatch(color), name]), ...(closed ? ['gap closed'] : [])];
    node.append(el('div', { class: 'card' }, table(head, rows.flat().filter(Boolean)),
      el('p', { class: 'caption' }, el('b', {}, 'original'), ' is the pretrained model; ', el('b', {}, 'window'), ' what is left of it when it sees its last tokens only, ',
        el('b', {}, 'window and sinks'), ' when it sees its first ones too; ', el('b', {}, 'extended'), ' has the latents for all the rest.',
        ' ' + measured.map((text) => (several ? `On ${text.name}: ${text.scored[0].toLowerCase()}${text.scored.slice(1)}` : text.scored)).join(' '),
        closed && ' The gap is what the pretrained model loses with window and sinks alone, in nats a token.')));
  }

  /* ---- context ---- */
  const drawn = texts.filter((text) => text.perplexity.lines.length || text.positions.lines.length);
  if (drawn.length) {
    const node = outline.section('context', 'Quality by context', 'A model that uses what it has read predicts better the more it has read; one that is given more than it was made for may lose its way.', 'Context');
    const grid = el('div', { class: 'figures' });
    node.append(grid);
    const on = (title, text) => (several ? `${title}, ${text.name}` : title);
    for (const text of drawn) {
      if (text.perplexity.lines.length) {
        const body = card(grid, on('Perplexity by length of context', text), 'The text is read in pieces of each length. Both scales are logarithmic.');
        chart(body, text.perplexity, { label: on('Perplexity by context', text), x: length, y: { label: 'perplexity', log: true, format: 'perplexity' } });
      }
      if (text.positions.lines.length) {
        const body = card(grid, on('Loss by position', text), 'Mean loss of the tokens at each distance from the start, in the longest context that each was given. The first ones have little before them.');
        chart(body, text.positions, { label: on('Loss by position', text), x: { ...length, label: 'position', reading: 'position #' }, y: { label: 'loss, nats a token' }, dots: false });
      }
    }
  }

  /* ---- the frontier ---- */
  if (data.frontier) {
    const { context, documents, charts, rows } = data.frontier;
    const counts = Object.entries(documents).map(([name, count]) => `${count} of ${name}`).join(', ');
    const node = outline.section('frontier', 'At equal memory', `Ways to spend the same memory, on stretches of ${context.toLocaleString('en')} tokens (${counts}): a longer window, tokens kept by their scores or by an oracle that knows the attention to come, latents, and all together. 0% is the recipe’s window with its first tokens, 100% the pretrained model with everything in sight.`, 'Memory');
    const grid = el('div', { class: 'figures stacked' });
    node.append(grid);
    for (const found of charts) {
      const body = card(grid, found.name[0].toUpperCase() + found.name.slice(1), 'By the bytes that the model remembers of one text.');
      chart(body, found, { label: found.name, x: { label: 'memory of the past', log: true, format: 'bytes', reading: '#' }, y: { label: 'part', format: 'percent' } });
    }
    node.append(el('details', {}, el('summary', {}, 'All ways'), table(['way', 'tokens in sight', 'memory', 'text', 'loss', 'gap closed', 'standard error', 'fact recalled'], rows.map((row) =>
      el('tr', {}, [row.way, row.tokens === null ? 'all' : row.tokens.toLocaleString('en'), Latte.bytes(row.bytes), row.text, orDash(row.loss, (value) => value.toFixed(4)), orDash(row.closed, Latte.percent), orDash(row.error, Latte.percent), orDash(row.recall, Latte.percent)].map((value) => el('td', {}, value)))), 'numbers plainly')));
  }

  /* ---- training ---- */
  const closures = texts.flatMap((text) => text.closed.map(([context, share]) => ({ name: several ? `${text.name}, ${Latte.length(context)}` : `${Latte.length(context)} tokens`, share })));
  if (closures.length || data.layers.lines.length || data.remember.lines.length) {
    const node = outline.section('training', 'What training brought', 'The latents start from clusters of the pretrained queries. First every layer learns to do what the pretrained layer did with all of the text; then the whole model learns to predict as it did.', 'Training');
    const grid = el('div', { class: 'figures stacked' });
    node.append(grid);
    if (closures.length) {
      const body = card(grid, 'Gap closed', 'Within the context that it was made for: how much of what the pretrained model loses with window and sinks alone the latents bring back.');
      const most = Math.max(1, ...closures.map(({ share }) => share));
      body.append(el('div', { class: 'bars', style: { '--full': 1 / most } }, closures.map(({ name, share }) => [
        el('span', { class: 'bar-name' }, name),
        el('span', { class: 'bar-track', 'aria-hidden': 'true' }, el('i', { style: { '--share': Math.max(0, share) / most } })),
        el('b', {}, Latte.percent(share)),
      ]), el('span'), el('span', { class: 'bar-ends' }, el('span', {}, '0%, window and sinks'), el('span', {}, '100%, original')), el('span')));
    }
    if (data.progress.lines.length) {
      const body = card(grid, 'Gap closed while teaching', 'The same on a few rows that were not trained on, at each stage’s own length, by the tokens read until then.');
      chart(body, data.progress, { label: 'Gap closed by tokens read', x: { label: 'tokens read', reading: '# tokens', format: 'integer' }, y: { label: 'gap closed', format: 'percent' } });
    }
    if (data.remember.lines.length) {
      const body = card(grid, 'Tokens worth keeping', 'Each layer keeps the tokens behind its window that a score expects to be looked at: the part of the pretrained layer’s attention behind the window that they get, on text that was not fitted on, and how much of the variance of log attention the scores explain.');
      chart(body, data.remember, { label: 'Attention captured by kept tokens', x: { label: 'layer', reading: 'layer #', format: 'integer' }, y: { label: 'part', format: 'percent' } });
    }
    if (data.layers.lines.length) {
      const body = card(grid, 'Distance from the pretrained layers', 'Squared error of each layer’s output on the pretrained layer’s own input, relative to that output, on text that was not trained on; each stage at its own length. Later stages answer for the whole model and may move single layers away.');
      chart(body, data.layers, { label: 'Distance of each layer', x: { label: 'layer', reading: 'layer #', format: 'integer' }, y: { label: 'relative squared error', log: true, format: 'small' }, dash: (line) => (line.name === 'before' ? '5 3' : 'none') });
    }
  }

  /* ---- retrieval ---- */
  const told = data.retrieval;
  if (told) {
    const trials = told.trials ? ` Each cell stands for ${told.trials} ${told.trials === 1 ? 'text' : 'texts'}.` : '';
    const node = outline.section('retrieval', 'A fact in a long text', `A word is told at some depth of the text and asked for at its end. Large: how often it is the likeliest of eight, which by chance is one time in eight. Small: its log-probability, in nats a token.${trials}`, 'Retrieval');
    const grid = el('div', { class: 'figures three' });
    node.append(grid);
    for (const { name, color, cells } of told.contenders) {
      grid.append(el('div', { class: 'card recall', style: { '--color': `var(--series-${color})` } }, el('h3', {}, swatch(color), name),
        table(['told at', ...told.contexts.map((context) => Latte.length(context))], told.depths.map((depth, row) => el('tr', {},
          el('th', { scope: 'row' }, Latte.percent(depth)), cells[row].map((cell) => (cell && cell[0] !== null
            ? el('td', { style: { '--share': cell[0] } }, Latte.percent(cell[0]), el('small', {}, orDash(cell[1], (value) => value.toFixed(1).replace('-', '−'))))
            : el('td', { class: 'quiet' }, '–'))))))));
    }
    node.append(el('p', { class: 'caption' }, outline.number(), 'Recall by depth (rows) and length of the text in tokens (columns).'));
  }

  /* ---- cost ---- */
  if (data.time.lines.length || data.state.lines.length) {
    const node = outline.section('cost', 'Writing: time and memory', 'The extended model keeps a state of one size; the pretrained one keeps every token it has read and looks at all of them for each it writes.', 'Time and memory');
    const grid = el('div', { class: 'figures' });
    node.append(grid);
    if (data.time.lines.length) {
      const body = card(grid, 'Time a token', 'Median time of writing one token after that much context, one text at a time.');
      chart(body, data.time, { label: 'Time a token by context', x: length, y: { label: 'time a token', log: true, format: 'milliseconds' } });
    }
    if (data.state.lines.length) {
      const body = card(grid, 'Memory of the past', 'What has to be kept of the text to go on from there, for one text.');
      chart(body, data.state, { label: 'State by context', x: length, y: { label: 'bytes', log: true, base: 2, format: 'bytes' } });
    }
  }

  /* ---- all figures ---- */
  if (measured.length) {
    const node = outline.section('figures', 'All figures', null, 'Figures');
    const rows = measured.flatMap((text) => text.rows.map((row) => el('tr', {}, [
      several ? text.name : null, row.contender, row.context.toLocaleString('en'), orDash(row.perplexity, perplexity), orDash(row.loss, (value) => value.toFixed(4)),
      orDash(row.bits_per_byte, (value) => value.toFixed(4)), orDash(row.tokens_per_second, Latte.formats.rate), orDash(row.state_bytes, Latte.bytes),
    ].filter((cell) => cell !== null).map((cell) => el('td', {}, cell)))));
    const head = [...(several ? ['text'] : []), 'model', 'context', 'perplexity', 'loss, nats', 'bits a byte', 'tokens/s read', 'memory'];
    node.append(el('details', { open: true }, el('summary', {}, 'Perplexity'), table(head, rows, several ? 'numbers' : 'numbers plainly')));
    if (told) {
      const lines = told.contenders.flatMap(({ name, cells }) => told.contexts.flatMap((context, column) => told.depths.map((depth, row) => [name, context, depth, cells[row][column]])));
      node.append(el('details', {}, el('summary', {}, 'Retrieval'), table(['model', 'context', 'told at', 'recall', 'log-probability'], lines.filter((line) => line[3]).map(([name, context, depth, cell]) =>
        el('tr', {}, [name, context.toLocaleString('en'), Latte.percent(depth), orDash(cell[0], (value) => value.toFixed(3)), orDash(cell[1], (value) => value.toFixed(3))].map((value) => el('td', {}, value)))), 'numbers plainly')));
    }
    const pairs = (found, places, format) => found.lines.map((line) => el('tr', {}, el('td', {}, line.name), places.map((place) => el('td', {}, orDash((line.points.find(([x]) => x === place) || [])[1], format)))));
    const placesOf = (found) => [...new Set(found.lines.flatMap((line) => line.points.map(([x]) => x)))].sort((a, b) => a - b);
    for (const [title, found, format, place] of [
      ['Time a token', data.time, Latte.formats.milliseconds, Latte.length], ['Memory of the past', data.state, Latte.bytes, Latte.length],
      ['Gap closed while teaching', data.progress, Latte.percent, (tokens) => `${tokens.toLocaleString('en')} tokens`],
      ['Tokens worth keeping', data.remember, Latte.percent, (index) => `layer ${index}`],
      ['Distance from the pretrained layers', data.layers, (value) => value.toFixed(5), (index) => `layer ${index}`],
    ]) {
      if (!found.lines.length) continue;
      const places = placesOf(found);
      node.append(el('details', {}, el('summary', {}, title), table(['', ...places.map(place)], pairs(found, places, format), 'numbers plainly')));
    }
  }

  const made = outline.section('settings', 'How it was made', 'The settings of the extension; the same settings and seed give the same weights.', 'Settings');
  made.append(el('details', { class: 'settings' }, el('summary', {}, 'recipe'), el('pre', { tabindex: 0 }, data.settings)));
  outline.finish();
})();
