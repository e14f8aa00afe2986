'use strict';
/* The page of `latte report`: sections in the order of a paper, each only if the run has what it shows. */
(() => {
  const { el } = Latte;
  const data = Latte.data('data');
  const page = document.getElementById('page');
  const runs = data.runs;
  const several = runs.length > 1;
  const has = (name) => runs.some((run) => run[name] && run[name].length);
  Latte.themeButton(document.querySelector('.theme'));

  const outline = Latte.outline(page, data.facts);
  const { section } = outline;
  const figure = (title, caption) => outline.figure(title, caption);

  // Each run keeps one colour through all figures.
  const lines = (name, options = {}) => runs.map((run, index) => ({ name: run.name, color: index, points: run[name] || [], dots: true, ...options }))
    .filter((line) => line.points.length);

  /* ---- results ---- */
  const columns = data.columns.filter((column) => runs.some((run) => run.row[column.key] !== null && run.row[column.key] !== undefined));
  if (columns.length) {
    const node = section('results', several ? 'Side by side' : 'Result', several
      ? `${data.same ? 'The same text and the same number of tokens for each.' : 'These runs differ in their text or their number of tokens.'} The best of each column stands out; a column’s name sorts by it.` : null, several ? null : 'Result');
    node.append(resultTable());
  }
  if (data.losses) {
    const node = section('losses', `Where ${data.losses.name} loses`, 'Everything that another model does better, and by how much.', 'Where it loses');
    node.append(el('div', { class: 'card' }, el('ul', {}, data.losses.points.map(([title, text]) => el('li', {}, el('strong', {}, title), ' ', text)))));
  }

  function resultTable() {
    let order = runs.map((_, index) => index);
    let sorted = null;
    const body = el('tbody');
    const heads = columns.map((column) => el('th', { scope: 'col' }, several
      ? el('button', { type: 'button', title: column.about, onclick: () => sortBy(column) }, column.label) : el('span', { title: column.about }, column.label)));
    const value = (index, column) => runs[index].row[column.key] ?? null;
    const draw = () => body.replaceChildren(...order.map((index) => el('tr', {},
      el('td', {}, several && el('i', { class: 'swatch', style: { background: `var(--series-${index % 8})` } }), runs[index].name),
      columns.map((column) => {
        const own = value(index, column);
        const all = runs.map((_, other) => value(other, column)).filter((v) => v !== null);
        const best = column.better && (column.better === 'low' ? Math.min(...all) : Math.max(...all));
        const stands = several && column.better && own === best && new Set(all).size > 1;
        return el('td', { class: stands ? 'best' : '' }, own === null ? '–' : Latte.formats[column.format](own));
      }))));
    const sortBy = (column) => {
      const down = sorted && sorted.key === column.key ? !sorted.down : column.better === 'high';
      sorted = { key: column.key, down };
      order.sort((a, b) => ((value(a, column) ?? Infinity) - (value(b, column) ?? Infinity)) * (down ? -1 : 1));
      heads.forEach((head, i) => head.toggleAttribute('aria-sort', false) || (columns[i].key === column.key && head.setAttribute('aria-sort', down ? 'descending' : 'ascending')));
      draw();
    };
    draw();
    return el('div', { class: 'card' }, el('div', { class: 'scroll', tabindex: 0 }, el('table', {}, el('thead', {}, el('tr', {}, el('th', { scope: 'col' }, 'model'), heads)), body)),
      data.table_note && el('p', { class: 'caption' }, data.table_note));
  }

  /* ---- training ---- */
  if (has('train') || has('valid')) {
    const node = section('training', 'Training', `Loss is the mean surprise of ${data.task === 'language' ? 'the next token' : 'an answer'}, in nats; lower is better.`);
    const lossLabel = data.task === 'language' ? 'loss, nats a token' : 'loss, nats an answer';
    const both = el('div', { class: 'figures' });
    node.append(both);
    // The first steps fall from the logarithm of the vocabulary; what comes after is what differs, so it gets the room.
    const afterStart = (shown) => Math.max(...shown.map((line) => line.points[Math.floor(line.points.length * 0.06)][1]));
    if (has('train')) {
      const { node: card, body } = figure('Training loss', 'Thin lines are single readings, strong ones their running mean.');
      both.append(card);
      Latte.lineChart(body, {
        label: 'Training loss by tokens read', x: { label: 'tokens', reading: '# tokens read', format: 'count' }, y: { label: lossLabel, top: afterStart },
        series: runs.map((run, index) => ({ name: run.name, color: index, faint: run.train, points: smooth(run.train) })).filter((line) => line.points.length),
      });
    }
    if (has('valid')) {
      const { node: card, body } = figure('Validation loss', data.task === 'language' ? 'Measured on rows of documents that were never trained on: other tokens than those of the table and of the figures by context.' : 'Measured on examples that were never trained on.');
      both.append(card);
      Latte.lineChart(body, {
        label: 'Validation loss by tokens read', x: { label: 'tokens', reading: '# tokens read', format: 'count' }, y: { label: lossLabel }, series: lines('valid'),
      });
    }
  }

  /* ---- accuracy ---- */
  if (has('accuracy')) {
    const chance = data.chance ? ` By chance it would be ${Latte.formats.percent(data.chance)}.` : '';
    const node = section('accuracy', 'Accuracy', `The share of right answers on examples that were never trained on.${chance}`);
    const { node: card, body } = figure('Accuracy while training', 'On the validation examples.');
    node.append(el('div', { class: 'figures' }, card));
    Latte.lineChart(body, {
      label: 'Accuracy by tokens read', x: { label: 'tokens', reading: '# tokens read', format: 'count' }, y: { label: 'accuracy', format: 'percent' }, series: lines('accuracy'),
    });
    const scored = runs.filter((run) => (run.scores || []).length > 1);
    if (scored.length) {
      const cells = (run) => run.scores.map((score) => el('td', { style: { background: `color-mix(in srgb, var(--series-0) ${Math.round(70 * score.accuracy)}%, transparent)` } }, Latte.formats.percent(score.accuracy)));
      node.append(el('div', { class: 'card' }, el('div', { class: 'scroll', tabindex: 0 }, el('table', { class: 'scores' },
        el('thead', {}, el('tr', {}, el('th', { scope: 'col' }, data.task === 'recall' ? 'tokens, pairs' : 'group'), scored[0].scores.map((score) => el('th', { scope: 'col' }, score.group)))),
        el('tbody', {}, scored.map((run) => el('tr', {}, el('td', {}, run.name), cells(run))))))));
    }
  }

  /* ---- confusion: examples of each class (rows) by the class they were taken for (columns) ---- */
  const confused = runs.filter((run) => (run.scores || []).length === 1 && (run.scores[0].about || {}).confusion);
  if (confused.length) {
    const node = section('confusion', 'What is taken for what', 'Test examples of each class, a row each, by the class that the model gave them; shares of the row.', 'Confusion');
    const grid = el('div', { class: 'figures' });
    node.append(grid);
    confused.forEach((run) => {
      const table = run.scores[0].about.confusion;
      const cell = (count, total) => el('td', { style: { background: `color-mix(in srgb, var(--series-0) ${Math.round(70 * count / Math.max(1, total))}%, transparent)` } }, Latte.formats.percent(count / Math.max(1, total)));
      grid.append(el('div', { class: 'card' }, el('h3', {}, run.name), el('div', { class: 'scroll', tabindex: 0 }, el('table', { class: 'scores' },
        el('thead', {}, el('tr', {}, el('th', { scope: 'col' }, 'class'), table.map((_, index) => el('th', { scope: 'col' }, String(index))))),
        el('tbody', {}, table.map((row, index) => el('tr', {}, el('td', {}, String(index)), row.map((count) => cell(count, row.reduce((a, b) => a + b, 0))))))))));
    });
  }

  // A running mean over about a twentieth of the run, corrected for its start.
  function smooth(points) {
    const keep = Math.exp(-1 / Math.max(1, points.length / 40));
    let sum = 0;
    let weight = 0;
    return points.map(([x, y]) => {
      sum = keep * sum + (1 - keep) * y;
      weight = keep * weight + (1 - keep);
      return [x, sum / weight];
    });
  }

  /* ---- context ---- */
  if (has('context') || has('positions')) {
    const node = section('context', 'Quality by context', 'A model that uses what it has read predicts better the more it has read, also beyond the length it was trained on.', 'Context');
    const both = el('div', { class: 'figures' });
    node.append(both);
    const marks = data.train_length ? [{ x: data.train_length, label: 'trained on' }] : [];
    if (has('context')) {
      const { node: card, body } = figure('Loss by length of context', `The same ${data.scored ? data.scored.toLocaleString('en') + ' ' : ''}held-out tokens at every length: the text is read in pieces of that length, with a state of one size where the model has one. Right of the dashed line is more than it ever saw in training.`);
      both.append(card);
      Latte.lineChart(body, { label: 'Loss by context length', x: { label: 'context, tokens', reading: '# tokens of context', log: true, base: 2, format: 'length' }, y: { label: 'loss, nats a token' }, series: lines('context'), marks });
    }
    if (has('positions')) {
      const { node: card, body } = figure('Loss by position', 'Mean loss of the tokens at each distance from the start of the text.');
      both.append(card);
      Latte.lineChart(body, { label: 'Loss by position', x: { label: 'position', reading: 'position #', log: true, base: 2, format: 'length' }, y: { label: 'loss, nats a token' }, series: lines('positions', { dots: false }), marks });
    }
  }

  /* ---- cost ---- */
  if (has('read') || has('decode') || has('memory')) {
    const node = section('cost', 'Speed and memory by length', 'Linear-time attention costs the same for every token, however many came before; softmax attention pays for each of them.', 'Speed and memory');
    const both = el('div', { class: 'figures three' });
    node.append(both);
    const x = { label: 'context, tokens', reading: '# tokens of context', log: true, base: 2, format: 'length' };
    for (const [key, title, label, format, caption] of [
      ['read', 'Reading speed', 'tokens a second', 'rate', 'How fast a text of each length is read, one text at a time.'],
      ['decode', 'Writing speed', 'tokens a second', 'rate', 'How fast text is written, one token at a time, after that much context.' + data.engines],
      ['memory', 'Memory of the past', 'bytes', 'bytes', 'What has to be kept of the text to go on from there, for one text.'],
    ]) {
      if (!has(key)) continue;
      const { node: card, body } = figure(title, caption);
      both.append(card);
      Latte.lineChart(body, { label: `${title} by length`, x, y: { label, format, log: true, base: key === 'memory' ? 2 : undefined }, series: lines(key) });
    }
  }

  /* ---- samples ---- */
  if (has('samples')) {
    const prompted = runs.some((run) => (run.samples || []).some((sample) => sample.prompt));
    const node = section('samples', 'What it writes', prompted ? 'Each model was given the shaded words and went on from there.' : 'Each model began with nothing before it.', 'Samples');
    const rows = Math.max(...runs.map((run) => (run.samples || []).length));
    const grid = el('div', { class: 'samples' + (runs.length === 3 ? ' three' : '') });
    for (let i = 0; i < rows; i++) {
      runs.forEach((run, index) => {
        const sample = (run.samples || [])[i];
        if (!sample) return;
        grid.append(el('article', { class: 'card sample' }, el('h3', {}, several && el('i', { class: 'swatch', style: { background: `var(--series-${index % 8})` } }), run.name),
          el('pre', { tabindex: 0 }, el('span', { class: 'prompt' }, sample.prompt), sample.text)));
      });
    }
    node.append(grid);
  }

  if (has('progress')) {
    const node = section('progress', 'What it wrote on the way', 'Samples while it was trained, the earliest first.', 'On the way');
    const grid = el('div', { class: 'samples' });
    runs.forEach((run) => (run.progress || []).forEach((sample) => {
      grid.append(el('article', { class: 'card sample' }, el('h3', {}, `${several ? run.name + ', ' : ''}step ${sample.step}`),
        el('pre', { tabindex: 0 }, el('span', { class: 'prompt' }, sample.prompt), sample.text)));
    }));
    node.append(grid);
  }

  /* ---- inside ---- */
  const inside = runs.filter((run) => run.inspection);
  const withLatents = inside.filter((run) => run.inspection.layers.some((layer) => layer.slots));
  let inspectors = null;

  if (withLatents.length) {
    const node = section('latents', 'What the latents do', 'For every token t, p(l|t) says how its attention is shared out among the latents l. Time runs to the right over a piece of text; each row is a latent, and the top row, set apart, is the window. Bars show mean shares: the window’s of all attention, each latent’s beside the most used one. If a model used few of its latents, most rows would stay pale.', 'Latents');
    const grid = el('div', { class: 'card whole' });
    const show = (run) => Latte.latentGrid(grid, run.inspection, run.latents, (layer, head, token) => {
      inspectors.show(run.name, { layer, head, token });
      document.getElementById('inspector').scrollIntoView();
    });
    if (withLatents.length > 1) node.append(picker(withLatents, show));
    node.append(grid, el('p', { class: 'caption' }, outline.number(), 'p(l|t) of every layer and head. Entropy is the mean over tokens; in use is the number of equally used latents that would be as diverse. A click opens the inspector there.'));
    show(withLatents[0]);
  }

  const collapsing = runs.filter((run) => run.collapse && run.collapse.entropy);
  if (collapsing.length) {
    const node = section('collapse', 'Do latents collapse?', 'Over training, for every layer, on held-out rows. Collapsed latents would show as a low entropy of p(l), many dead latents, or latents that read the same tokens.', 'Collapse');
    collapsing.forEach((run) => {
      if (several) node.append(el('h3', {}, run.name));
      const three = el('div', { class: 'figures three' });
      node.append(three);
      for (const [key, title, caption] of [
        ['entropy', 'Entropy of p(l)', 'As a part of its maximum: 1 if all latents are used alike.'],
        ['dead', 'Dead latents', 'Share of latents with less than a tenth of an even share.'],
        ['overlap', 'Overlap', 'Mean cosine of p(s|l) of two latents: 1 if all read the same tokens.'],
      ]) {
        const { node: card, body } = figure(title, caption);
        three.append(card);
        Latte.lineChart(body, { label: `${title} by tokens read`, x: { label: 'tokens', reading: '# tokens read', format: 'count' }, y: { label: title, format: 'percent' },
          series: run.collapse[key].map(([layer, points]) => ({ name: `layer ${layer}`, color: layer, points, dots: true })) });
      }
    });
  }

  if (inside.length) {
    const node = section('inspect', 'Look inside', 'Choose a token to see which positions it attends to: the stronger the shade, the larger the weight. Arrow keys move the choice; a bar under p(l|t) shows what that latent reads.', 'Inspector');
    const holder = el('div', { id: 'inspector' });
    const made = new Map();
    inspectors = {
      show(name, change = {}) {
        const run = inside.find((one) => one.name === name);
        if (!made.has(name)) {
          const own = el('div');
          made.set(name, { own, ...Latte.inspector(own, run.inspection) });
        }
        const chosen = made.get(name);
        holder.replaceChildren(chosen.own);
        holder.dataset.token = '';
        if (pick) pick.choose(name);
        chosen.choose(change);
      },
    };
    const pick = inside.length > 1 ? picker(inside, (run) => inspectors.show(run.name)) : null;
    if (pick) node.append(pick);
    node.append(holder);
    inspectors.show((withLatents[0] || inside[0]).name);
  }

  function picker(choices, onPick) {
    const node = Latte.choice('Model', choices.map((run) => ({ value: run.name, label: run.name })), choices[0].name,
      (name) => onPick(choices.find((run) => run.name === name)));
    node.classList.add('picker');
    return node;
  }

  /* ---- how it was made ---- */
  const settings = runs.filter((run) => run.settings);
  if (settings.length) {
    const node = section('settings', 'How it was made', 'The settings of every run; the same settings and seed give the same weights.', 'Settings');
    node.append(...settings.map((run) => el('details', { class: 'settings' }, el('summary', {}, run.name), el('pre', { tabindex: 0 }, run.settings))));
  }
  for (const note of data.notes || []) page.append(el('p', { class: 'caption' }, note));
  outline.finish();
})();
