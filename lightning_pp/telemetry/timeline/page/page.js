"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const unit = data.unit;
  const find = (id) => document.getElementById(id);
  const LABELS = 64, BUBBLES = 62, AXIS = 24;

  // ---------------------------------------------------------------- the data

  const ACTION = /^(\d+)([A-Z_]+?)(\d*)$/;

  /** "0F3 0I3" to objects; what is not computed on a microbatch has microbatch null. */
  function actionsOf(text, rank) {
    return text ? text.split(" ").map((name, index) => {
      const [, stage, kind, microbatch] = ACTION.exec(name);
      return { name, rank, index, stage: +stage, kind, microbatch: microbatch === "" ? null : +microbatch };
    }) : [];
  }

  function programOf(program) {
    const ranks = program.ranks.map(actionsOf), byName = new Map();
    ranks.flat().forEach((action) => byName.set(action.name, action));
    const firstStage = ranks.map((_, rank) => program.rank_of_stage.indexOf(rank));
    const ofMicrobatch = Array.from({ length: program.num_microbatches }, () => []);
    ranks.flat().forEach((action) => ofMicrobatch[action.microbatch].push(action));
    return { ...program, ranks, byName, firstStage, ofMicrobatch, sharding: program.sharding.map(actionsOf) };
  }
  const program = programOf(data.program);

  /** For each action: asked, waiting (from when it waited), begin and end, in units of time. */
  function timesOf(row, tick) {
    const times = [];
    let now = 0;
    for (let i = 0; i < row.length; i += 4) {
      const asked = now + row[i], waiting = asked + row[i + 1], begin = waiting + row[i + 2];
      now = begin + row[i + 3];
      times.push({ asked: asked * tick, waiting: waiting * tick, begin: begin * tick, end: now * tick });
    }
    return times;
  }

  function stepOf(raw) {
    const views = raw.views.map((view) => {
      const ranks = view.ranks.map((row) => timesOf(row, raw.tick));
      const sharding = view.sharding.map((row) => {
        const times = [];
        for (let i = 0; i < row.length; i += 2) times.push({ begin: row[i] * raw.tick, end: (row[i] + row[i + 1]) * raw.tick });
        return times;
      });
      const span = Math.max(0, ...[...ranks, ...sharding].map((times) => times.reduce((most, one) => Math.max(most, one.end), 0)));
      return { ...view, ranks, sharding, span };
    });
    return { ...raw, program, views, span: Math.max(...views.map((view) => view.span)) };
  }

  /** The action of a neighbouring stage whose message this one needs. */
  function neededBy(program, action) {
    if (action.kind === "F") return program.byName.get(`${action.stage - 1}F${action.microbatch}`);
    if (action.kind !== "I" && action.kind !== "B") return undefined;
    return ["I", "B"].map((kind) => program.byName.get(`${action.stage + 1}${kind}${action.microbatch}`)).find(Boolean);
  }

  // ---------------------------------------------------------------- what is shown

  const step = stepOf(data);
  let hovered = null, canvases = [], scheduled = false, isMoved = false;
  let from = 0, to = 1;
  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  function number(value) {
    const size = Math.abs(value);
    return value.toFixed(size >= 100 ? 1 : size >= 10 ? 2 : size >= 0.1 ? 3 : 4).replace(/\.?0+$/, "") || "0";
  }
  const time = (value) => `${number(value)} ${unit}`;
  const percent = (value) => `${(100 * value).toFixed(1)} %`;

  function show() {
    const [planned, measured] = step.views;
    const about = find("about");
    if (measured) {
      const longer = measured.span - planned.span;
      const text = longer > 0 ? `${time(longer)} (${percent(longer / measured.span)}) more than planned` : "as fast as planned";
      about.append(bold(`Step ${step.step}`), " took ", bold(time(measured.span)), `, ${text}. Planned: every action takes the median of its stage in this step.`);
    }
    const views = find("views");
    canvases = step.views.map((view) => {
      const heading = document.createElement("h2"), note = document.createElement("small"), pair = document.createElement("div");
      const canvas = document.createElement("canvas"), over = document.createElement("canvas"); // what is pointed at, over the rest
      const mean = view.bubbles.reduce((sum, one) => sum + one, 0) / view.bubbles.length;
      note.textContent = ` ${time(view.span)}, mean bubble ${percent(mean)}`;
      heading.append(view.name, note);
      pair.append(canvas, over);
      views.append(heading, pair);
      listen(over, view);
      return { canvas, over, view };
    });
    reset();
  }

  function bold(text) {
    const element = document.createElement("b");
    element.textContent = text;
    return element;
  }

  /** Draws soon; only what is over the rest, unless something has moved. */
  function redraw(moved = true) {
    isMoved = isMoved || moved;
    if (scheduled) return;
    scheduled = true;
    requestAnimationFrame(() => {
      scheduled = false;
      if (isMoved) drawPlot();
      else canvases.forEach(drawOver);
      if (roomForPlot() !== plotWidth) drawPlot(); // a scroll bar has come or gone with the heights
      isMoved = false;
    });
  }

  const roomForPlot = () => Math.max(50, find("axis").clientWidth - LABELS - BUBBLES);

  function drawPlot() {
    plotWidth = roomForPlot();
    drawAxis();
    canvases.forEach(drawView);
    canvases.forEach(drawOver);
  }

  function reset() {
    from = 0;
    to = step.span || 1;
    redraw();
  }

  function move(by) {
    const width = to - from;
    from = Math.min(Math.max(from + by, -width / 2), step.span - width / 2);
    to = from + width;
    redraw();
  }

  function zoom(at, factor) {
    const width = Math.min(Math.max((to - from) * factor, step.span / 1e5), step.span * 1.5);
    from = at - (at - from) * width / (to - from);
    to = from + width;
    move(0);
  }

  // ---------------------------------------------------------------- drawing

  const rowPitch = () => step.program.ranks.length <= 16 ? 28 : step.program.ranks.length <= 32 ? 21 : 15;
  const rowHeight = () => rowPitch() - (rowPitch() > 20 ? 6 : 3);
  let plotWidth = 100; // of all canvases; asking for it at each action would take longer than drawing
  const xOf = (at) => LABELS + (at - from) / (to - from) * plotWidth;
  const timeAt = (x) => from + (x - LABELS) / plotWidth * (to - from);

  function prepared(canvas, height) {
    const ratio = window.devicePixelRatio || 1, width = canvas.clientWidth;
    canvas.style.height = `${height}px`;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    const context = canvas.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.font = '12px system-ui, "DejaVu Sans", sans-serif';
    context.textBaseline = "middle";
    return context;
  }

  function ticks() {
    const least = (to - from) / 10, magnitude = 10 ** Math.floor(Math.log10(least));
    const distance = [1, 2, 5, 10].map((factor) => factor * magnitude).find((one) => one >= least * (1 - 1e-9));
    const found = [];
    for (let i = Math.ceil(from / distance - 1e-9); i * distance <= to; i++) found.push(i * distance);
    return { found, digits: Math.max(0, -Math.floor(Math.log10(distance) + 1e-9)) };
  }

  function drawAxis() {
    const canvas = find("axis"), context = prepared(canvas, AXIS), { found, digits } = ticks();
    context.fillStyle = color("--quiet");
    context.textAlign = "center";
    for (const tick of found) context.fillText(`${tick.toFixed(digits)} ${unit}`, xOf(tick), 10);
    context.textAlign = "right";
    context.fillText("bubble", canvas.clientWidth, 10);
  }

  /** Index of the first of sorted times that ends after a moment. */
  function firstAfter(times, moment) {
    let low = 0, high = times.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (times[middle].end <= moment) low = middle + 1; else high = middle;
    }
    return low;
  }

  function drawView({ canvas, view }) {
    const pitch = rowPitch(), height = rowHeight(), context = prepared(canvas, view.ranks.length * pitch + 4);
    const right = LABELS + plotWidth, program = step.program;
    context.strokeStyle = color("--line");
    context.beginPath();
    for (const tick of ticks().found) {
      const x = Math.round(xOf(tick)) + 0.5;
      if (x >= LABELS && x <= right) { context.moveTo(x, 0); context.lineTo(x, view.ranks.length * pitch); }
    }
    context.stroke();
    context.fillStyle = color("--ink");
    view.ranks.forEach((_, rank) => {
      const middle = rank * pitch + height / 2;
      context.textAlign = "left";
      context.fillText(`rank ${rank}`, 0, middle);
      context.textAlign = "right";
      context.fillText(percent(view.bubbles[rank]), canvas.clientWidth, middle);
    });
    context.save();
    context.beginPath();
    context.rect(LABELS, 0, right - LABELS, view.ranks.length * pitch);
    context.clip();
    const colors = { idle: color("--idle"), wait: color("--wait") };
    view.ranks.forEach((times, rank) => {
      drawRow(context, program, times, rank, rank * pitch, height, colors);
      drawSharding(context, program, view.sharding[rank] || [], rank, rank * pitch + height);
    });
    context.restore();
  }

  /** Where an action stands: all but the first stage of a rank are lower. */
  function boxOf(program, action, times, top, height) {
    const lower = action.stage === program.firstStage[action.rank] ? 0 : Math.round(height * 0.27);
    const x = xOf(times.begin);
    return { x, width: xOf(times.end) - x, y: top + lower, height: height - lower };
  }

  function drawRow(context, program, times, rank, top, height, colors) {
    if (!times.length) return;
    const actions = program.ranks[rank], { waiting, asked, begin } = times[0], first = xOf(begin - (waiting - asked));
    context.fillStyle = colors.idle;
    context.fillRect(first, top, xOf(times[times.length - 1].end) - first, height);
    const groups = new Map(), waits = [], labels = [];
    let lastX = -1;
    for (let i = firstAfter(times, from); i < times.length && times[i].asked <= to; i++) {
      const moment = times[i], action = actions[i], { x, width, y, height: tall } = boxOf(program, action, moment, top, height);
      const waitX = xOf(moment.waiting);
      if (x - waitX > 0.5) waits.push([waitX, top + height * 0.35, x - waitX, height * 0.3]);
      if (width < 0.5 && x < lastX + 0.5) continue; // too many to be seen apart
      lastX = x;
      const key = `${action.kind} ${action.microbatch % 2}`;
      if (!groups.has(key)) groups.set(key, []);
      const boxes = groups.get(key);
      if (moment.waiting > moment.asked) boxes.push([xOf(moment.asked), y, Math.max(waitX - xOf(moment.asked), 0.5), tall]);
      boxes.push([x, y, Math.max(width - (width > 4 ? 0.75 : 0), 0.5), tall]);
      const label = width > 44 ? `${action.kind} ${action.microbatch}` : String(action.microbatch);
      if (height >= 11 && width > 7 * label.length + 3) labels.push([label, x + width / 2, y + tall / 2 + 0.5]);
    }
    context.fillStyle = colors.wait;
    for (const box of waits) context.fillRect(...box);
    for (const [key, boxes] of groups) {
      const [kind, odd] = key.split(" ");
      context.fillStyle = data.kinds[kind].color;
      context.globalAlpha = odd === "1" ? 0.78 : 1;
      for (const box of boxes) context.fillRect(...box);
    }
    context.globalAlpha = 1;
    context.fillStyle = "#fff";
    context.textAlign = "center";
    for (const label of labels) context.fillText(...label);
  }

  function drawSharding(context, program, times, rank, top) {
    times.forEach(({ begin, end }, i) => {
      context.fillStyle = data.kinds[program.sharding[rank][i].kind].color;
      context.fillRect(xOf(begin), top, Math.max(xOf(end) - xOf(begin), 1.5), 3);
    });
  }

  /** Outlines of the microbatch that is pointed at, and arrows from what its action needed to what needs it. */
  function drawOver({ over, view }) {
    const pitch = rowPitch(), height = rowHeight(), context = prepared(over, view.ranks.length * pitch + 4);
    if (!hovered) return;
    const program = step.program, { action } = hovered;
    const timesOf = (one) => view.ranks[one.rank][one.index];
    context.beginPath();
    context.rect(LABELS, 0, plotWidth, view.ranks.length * pitch);
    context.clip();
    context.strokeStyle = context.fillStyle = color("--same");
    for (const one of program.ofMicrobatch[action.microbatch]) {
      const box = boxOf(program, one, timesOf(one), one.rank * pitch, height);
      if (box.width <= 1 && one !== action) continue;
      context.lineWidth = one === action ? 2 : 1;
      context.strokeRect(box.x + 0.5, box.y + 0.5, Math.max(box.width - 1.5, 1), box.height - 1);
    }
    if (hovered.view !== view) return;
    const needed = neededBy(program, action), pairs = needed ? [[needed, action]] : [];
    for (const one of program.ofMicrobatch[action.microbatch]) if (neededBy(program, one) === action) pairs.push([action, one]);
    context.lineWidth = 1.5;
    for (const [sender, receiver] of pairs) {
      const x = xOf(timesOf(sender).end), y = sender.rank * pitch + height / 2;
      const endX = xOf(timesOf(receiver).begin), endY = receiver.rank * pitch + height / 2;
      context.beginPath();
      context.moveTo(x, y);
      context.bezierCurveTo(x + 12, y, endX - 12, endY, endX, endY);
      context.stroke();
      context.beginPath();
      context.arc(endX, endY, 3, 0, 7);
      context.fill();
    }
  }

  // ---------------------------------------------------------------- under the pointer

  /** The action of a rank at a moment: in it, or in the gap before it. */
  function at(view, rank, moment) {
    const times = view.ranks[rank], index = firstAfter(times, moment);
    if (index >= times.length) return null;
    const { asked, waiting, begin } = times[index];
    const inside = moment >= begin || (moment >= asked && moment < waiting);
    return { view, rank, action: step.program.ranks[rank][index], inside, waits: !inside && moment >= waiting };
  }

  function describe({ view, action, inside, waits }) {
    const times = view.ranks[action.rank][action.index], twin = step.views.find((other) => other !== view);
    const needed = neededBy(step.program, action), waited = times.begin - times.waiting;
    const before = action.index ? view.ranks[action.rank][action.index - 1].end : 0;
    const took = times.end - times.begin + times.waiting - times.asked;
    const rows = [];
    if (inside) {
      rows.push(["stage", `${action.stage} on rank ${action.rank}`], ["microbatch", String(action.microbatch)], ["took", time(took)]);
      if (twin) {
        const other = twin.ranks[action.rank][action.index], otherTook = other.end - other.begin + other.waiting - other.asked;
        rows.push([twin.name, `${time(otherTook)}, from ${time(other.begin)}`]);
      }
      rows.push(["from, to", `${time(times.begin)}, ${time(times.end)}`]);
    } else {
      rows.push(["rank", String(action.rank)], ["gap", time(times.begin - before)]);
    }
    if (needed) {
      const sent = view.ranks[needed.rank][needed.index].end;
      const ended = sent <= times.waiting ? `had ended ${time(times.waiting - sent)} before` : `ended at ${time(sent)}`;
      if (needed.rank === action.rank) rows.push(["needed", `${needed.name} of the same rank, ${ended}`]);
      else rows.push(waited > 0 ? ["waited", `${time(waited)} for ${needed.name} of rank ${needed.rank}, which ${ended}`] : ["waited", `not at all: ${needed.name} of rank ${needed.rank} ${ended}`]);
    } else if (waited > 0) rows.push(["waited", time(waited)]);
    const title = inside ? `${action.name}: ${data.kinds[action.kind].name}` : waits ? `waiting, then ${action.name}` : `idle, then ${action.name}`;
    return { title, rows };
  }

  function tell(event) {
    const tip = find("tip");
    if (!hovered) { tip.hidden = true; return; }
    const { title, rows } = describe(hovered), table = document.createElement("table");
    for (const row of rows) {
      const line = table.insertRow();
      for (const text of row) line.insertCell().textContent = text;
    }
    tip.replaceChildren(bold(title), table);
    tip.hidden = false;
    const { offsetWidth: width, offsetHeight: height } = tip;
    tip.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - width - 8))}px`;
    tip.style.top = `${event.clientY + 18 + height > innerHeight ? Math.max(4, event.clientY - height - 12) : event.clientY + 18}px`;
  }

  function listen(canvas, view) {
    let last = null;
    canvas.addEventListener("wheel", (event) => {
      event.preventDefault();
      const width = (to - from) / plotWidth;
      if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) move((event.deltaX || event.deltaY) * width);
      else zoom(timeAt(event.offsetX), Math.exp(Math.max(-100, Math.min(100, event.deltaY)) * 0.0025));
    }, { passive: false });
    canvas.addEventListener("pointerdown", (event) => {
      last = event;
      canvas.setPointerCapture(event.pointerId);
      canvas.classList.add("moving");
    });
    const stop = () => { last = null; canvas.classList.remove("moving"); };
    canvas.addEventListener("pointerup", stop);
    canvas.addEventListener("pointercancel", stop);
    canvas.addEventListener("pointermove", (event) => {
      if (last) {
        move((last.clientX - event.clientX) * (to - from) / plotWidth);
        if (event.pointerType === "mouse") scrollBy(0, last.clientY - event.clientY);
        last = event;
      }
      const rank = Math.floor(event.offsetY / rowPitch());
      const before = hovered && hovered.action;
      const isInside = event.offsetX >= LABELS && event.offsetX <= LABELS + plotWidth && rank < view.ranks.length;
      hovered = isInside ? at(view, rank, timeAt(event.offsetX)) : null;
      tell(event);
      if ((hovered && hovered.action) !== before) redraw(false);
    });
    canvas.addEventListener("pointerleave", () => { hovered = null; find("tip").hidden = true; redraw(false); });
    canvas.addEventListener("dblclick", reset);
  }

  addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const quarter = (to - from) / 4, middle = (from + to) / 2;
    const keys = {
      ArrowLeft: () => move(-quarter), ArrowRight: () => move(quarter), 0: reset,
      "+": () => zoom(middle, 0.7), "=": () => zoom(middle, 0.7), "-": () => zoom(middle, 1 / 0.7),
    };
    if (keys[event.key]) { event.preventDefault(); keys[event.key](); }
  });
  addEventListener("resize", () => redraw());
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => redraw());

  // ---------------------------------------------------------------- the start

  document.querySelector("h1").textContent = document.title;
  const used = new Set([...program.ranks, ...program.sharding].flat().map((action) => action.kind));
  const legend = Object.entries(data.kinds).filter(([kind]) => used.has(kind)).map(([kind, about]) => [about.color, `${kind} ${about.name}`]);
  legend.push(["var(--wait)", "waits for another rank"], ["var(--idle)", "idle"]);
  for (const [fill, text] of legend) {
    const entry = document.createElement("span"), swatch = document.createElement("i");
    swatch.style.background = fill;
    entry.append(swatch, text);
    find("legend").append(entry);
  }
  const note = document.createElement("span");
  note.textContent = program.rank_of_stage.length > program.ranks.length ? "numbers: microbatches; lower boxes: a rank's later stages" : "numbers: microbatches";
  find("legend").append(note);
  show();
})();
