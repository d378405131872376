"use strict";
(() => {
  const ARRAYS = {
    i1: Int8Array, u1: Uint8Array, i2: Int16Array, u2: Uint16Array, i4: Int32Array, u4: Uint32Array, f8: Float64Array,
  };
  const { looks, tracks } = JSON.parse(document.getElementById("looks").textContent);
  const LEFT = 46, AXIS = 24, TALLEST = 640, LEAST_SPAN_NS = 50, FINE_PX = 1.5;
  const tip = document.getElementById("tip");
  const runs = new Map();

  // ---- data

  async function unpack(column) {
    const text = atob(column.data), packed = new Uint8Array(text.length);
    for (let i = 0; i < text.length; i++) packed[i] = text.charCodeAt(i);
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
    const planes = new Uint8Array(await new Response(stream).arrayBuffer());
    const size = ARRAYS[column.type].BYTES_PER_ELEMENT, count = column.count;
    const bytes = new Uint8Array(count * size);
    for (let plane = 0; plane < size; plane++)
      for (let i = 0, from = plane * count, to = plane; i < count; i++, from++, to += size) bytes[to] = planes[from];
    const stored = new ARRAYS[column.type](bytes.buffer);
    if (!column.is_sum) return stored;
    const values = new Float64Array(count);
    for (let i = 0, sum = 0; i < count; i++) values[i] = sum += stored[i];
    return values;
  }

  async function unpackAll(columns) {
    const names = Object.keys(columns);
    const values = await Promise.all(names.map((name) => unpack(columns[name])));
    return Object.fromEntries(names.map((name, i) => [name, values[i]]));
  }

  /** Gives the first place in [first, last) whose value is above `limit`; the values do not fall. */
  function above(values, limit, first, last) {
    while (first < last) {
      const middle = (first + last) >> 1;
      if (values[middle] > limit) last = middle;
      else first = middle + 1;
    }
    return first;
  }

  // ---- words

  function shortTime(ns, isInUnits) {
    if (isInUnits) return `${Number((ns / 1e9).toPrecision(9))} units`;
    const size = Math.abs(ns);
    const [unit, scale] = size >= 1e9 ? ["s", 1e9] : size >= 1e6 ? ["ms", 1e6] : ["\u00b5s", 1e3];
    return `${Number((ns / scale).toPrecision(size >= 1e3 * scale ? 9 : 6))} ${unit}`;
  }

  function shortBytes(bytes) {
    const [unit, scale] = bytes >= 2 ** 30 ? ["GiB", 2 ** 30] : bytes >= 2 ** 20 ? ["MiB", 2 ** 20] : ["KiB", 2 ** 10];
    return bytes < 1024 ? `${bytes} bytes` : `${Number((bytes / scale).toPrecision(4))} ${unit}`;
  }

  function paperColours() {
    const style = getComputedStyle(document.documentElement);
    const names = ["paper", "soft", "line", "idle", "curve", "area"];
    return Object.fromEntries(names.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
  }

  // ---- what the pictures of a run share: the time that is looked at, and the first rank

  class Views {
    constructor(box, data) {
      this.box = box;
      this.data = data;
      this.range = box.querySelector(".range");
      this.pictures = [];
      this.waiting = false;
      this.drawMs = 0;
    }

    async load() {
      const { timeline, memory, windows } = this.data;
      this.ranks = timeline.ranks;
      this.columns = await unpackAll(timeline.columns);
      this.offsets = await unpack(timeline.offsets);
      const { start_ns: start, duration_ns: length } = this.columns;
      this.end = new Float64Array(start.length);
      this.latest = new Float64Array(start.length); // the latest end in the track so far: it does not fall
      this.lastNs = 1;
      for (let place = 0; place + 1 < this.offsets.length; place++) {
        let latest = -Infinity;
        for (let i = this.offsets[place]; i < this.offsets[place + 1]; i++) {
          this.end[i] = start[i] + length[i];
          latest = Math.max(latest, this.end[i]);
          this.latest[i] = latest;
        }
        this.lastNs = Math.max(this.lastNs, latest);
      }
      this.pictures.push(new Timeline(this, this.box.querySelector("canvas.timeline")));
      if (memory) {
        const curves = [];
        for (const curve of memory.curves) {
          const { offsets, time_ns, value_bytes } = curve;
          curves.push({ ...curve, ...(await unpackAll({ offsets, time_ns, value_bytes })) });
        }
        this.pictures.push(new Memory(this, this.box.querySelector("canvas.memory"), memory.ranks, curves));
      }
      this.showLegend();
      this.showStep(windows.step.indexOf(windows.first));
      for (const button of this.box.querySelectorAll("button[data-act]"))
        button.addEventListener("click", () => this.act(button.dataset.act));
      new ResizeObserver(() => this.draw()).observe(this.box);
      matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
      this.drawNow();
    }

    showLegend() {
      const used = new Set(this.columns.look), legend = this.box.querySelector(".legend");
      looks.forEach((look, number) => {
        if (!used.has(number)) return;
        const item = document.createElement("li"), swatch = document.createElement("i");
        swatch.style.background = look.colour;
        const shade = look.shade === null ? "" : `, ${this.data.timeline.shades[look.shade] ?? ""}`;
        item.append(swatch, look.legend + (shade === ", " ? "" : shade));
        legend.append(item);
      });
    }

    act(name) {
      const span = this.to - this.from, { step, start_ns: start } = this.data.windows;
      if (name === "in" || name === "out") this.zoom(name === "in" ? 0.5 : 2, this.from + span / 2);
      if (name === "left" || name === "right") this.look(this.from + (name === "left" ? -0.25 : 0.25) * span);
      if (name === "all") this.look(0, this.lastNs);
      if (name === "next" || name === "previous") {
        const now = Math.max(above(start, this.from + span / 2, 0, step.length) - 1, 0);
        this.showStep(Math.min(Math.max(now + (name === "next" ? 1 : -1), 0), step.length - 1));
      }
    }

    showStep(place) {
      const { start_ns: start, end_ns: end } = this.data.windows;
      if (place >= 0 && place < start.length) this.look(start[place], end[place] - start[place]);
      else this.look(0, this.lastNs);
    }

    zoom(factor, about) {
      const span = Math.min(Math.max((this.to - this.from) * factor, LEAST_SPAN_NS), 1.1 * this.lastNs);
      this.look(about - ((about - this.from) / (this.to - this.from)) * span, span);
    }

    look(from, span = this.to - this.from) {
      const margin = 0.05 * this.lastNs;
      span = Math.max(span, LEAST_SPAN_NS);
      this.from = Math.max(Math.min(from, this.lastNs + margin - span), -margin);
      this.to = this.from + span;
      this.draw();
    }

    draw() {
      if (this.waiting) return;
      this.waiting = true;
      requestAnimationFrame(() => {
        this.waiting = false;
        this.drawNow();
      });
    }

    drawNow() {
      const begin = performance.now();
      for (const picture of this.pictures) picture.draw();
      this.range.value = `${shortTime(this.from, this.data.is_in_units)} to ${shortTime(this.to, this.data.is_in_units)}`;
      this.drawMs = performance.now() - begin;
    }
  }

  // ---- a canvas with a lane for each rank, over the common time

  class Lanes {
    constructor(views, canvas, ranks, lanePx) {
      Object.assign(this, { views, canvas, ranks, lanePx, top: 0 });
      this.context = canvas.getContext("2d");
      this.shown = Math.max(Math.min(ranks.length, Math.floor((TALLEST - AXIS) / lanePx)), 1);
      canvas.style.height = `${this.shown * lanePx + AXIS}px`;
      canvas.addEventListener("wheel", (event) => this.onWheel(event), { passive: false });
      canvas.addEventListener("pointerdown", (event) => this.onDown(event));
      canvas.addEventListener("pointermove", (event) => this.onMove(event));
      canvas.addEventListener("pointerup", () => (this.held = null));
      canvas.addEventListener("pointercancel", () => (this.held = null));
      canvas.addEventListener("pointerleave", () => (tip.hidden = true));
      canvas.addEventListener("keydown", (event) => this.onKey(event));
    }

    get scale() {
      return (this.canvas.clientWidth - LEFT) / (this.views.to - this.views.from);
    }

    scroll(lanes) {
      this.top = Math.min(Math.max(this.top + lanes, 0), this.ranks.length - this.shown);
      this.views.draw();
    }

    onWheel(event) {
      event.preventDefault();
      tip.hidden = true;
      if (event.shiftKey) this.scroll(Math.sign(event.deltaY || event.deltaX) * Math.ceil(this.shown / 4));
      else this.views.zoom(Math.exp(Math.min(Math.max(event.deltaY, -300), 300) / 400), this.timeAt(event));
    }

    onDown(event) {
      this.canvas.setPointerCapture(event.pointerId);
      this.held = { x: event.clientX, y: event.clientY, from: this.views.from, top: this.top };
    }

    onMove(event) {
      if (!this.held) return this.hover(event);
      tip.hidden = true;
      this.top = this.held.top;
      this.scroll(Math.round((this.held.y - event.clientY) / this.lanePx));
      this.views.look(this.held.from - (event.clientX - this.held.x) / this.scale);
    }

    onKey(event) {
      const acts = { "+": "in", "=": "in", "-": "out", ArrowLeft: "left", ArrowRight: "right", Home: "all" };
      const lanes = { ArrowUp: -1, ArrowDown: 1, PageUp: -this.shown, PageDown: this.shown };
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      if (event.key in acts) this.views.act(acts[event.key]);
      else if (event.key in lanes && this.ranks.length > this.shown) this.scroll(lanes[event.key]);
      else return;
      event.preventDefault();
    }

    timeAt(event) {
      const x = event.clientX - this.canvas.getBoundingClientRect().left;
      return this.views.from + (x - LEFT) / this.scale;
    }

    hover(event) {
      const box = this.canvas.getBoundingClientRect();
      const place = (event.clientY - box.top) / this.lanePx, lane = Math.floor(place) + this.top;
      const isInside = event.clientX - box.left >= LEFT && place < this.shown && lane < this.ranks.length;
      const words = isInside ? this.words(lane, place - Math.floor(place), this.timeAt(event)) : null;
      tip.hidden = !words;
      if (!words) return;
      tip.textContent = words.join("\n");
      const left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 6);
      const below = event.clientY + 16, above = event.clientY - tip.offsetHeight - 10;
      tip.style.left = `${Math.max(left, 4)}px`;
      tip.style.top = `${below + tip.offsetHeight > innerHeight ? above : below}px`;
    }

    begin() {
      const { canvas, context } = this, sharp = devicePixelRatio || 1;
      const width = canvas.clientWidth, height = canvas.clientHeight;
      this.colours = paperColours();
      canvas.width = Math.round(width * sharp);
      canvas.height = Math.round(height * sharp);
      context.setTransform(sharp, 0, 0, sharp, 0, 0);
      context.fillStyle = this.colours.paper;
      context.fillRect(0, 0, width, height);
      return width;
    }

    finish(width) {
      const { context, views } = this, bottom = this.shown * this.lanePx;
      context.clearRect(0, 0, LEFT - 1, bottom);
      context.font = "11px system-ui, sans-serif";
      context.fillStyle = this.colours.soft;
      context.textBaseline = "middle";
      context.textAlign = "right";
      const every = Math.max(Math.ceil(13 / this.lanePx), 1);
      for (let row = 0; row < this.shown; row += every)
        context.fillText(String(this.ranks[row + this.top]), LEFT - 6, (row + 0.5) * this.lanePx);
      const steps = views.data.windows.end_ns, first = above(steps, views.from, 0, steps.length);
      const last = above(steps, views.to, first, steps.length);
      if (last - first < 60)
        for (let i = first; i < last; i++) context.fillRect(LEFT + (steps[i] - views.from) * this.scale, 0, 1, bottom);
      const span = views.to - views.from, rough = span / Math.max((width - LEFT) / 110, 1);
      const power = 10 ** Math.floor(Math.log10(rough));
      const tick = [1, 2, 5, 10].map((factor) => factor * power).find((value) => value >= rough);
      context.textAlign = "center";
      context.textBaseline = "top";
      for (let t = Math.ceil(views.from / tick) * tick; t <= views.to; t += tick) {
        const x = LEFT + (t - views.from) * this.scale;
        context.fillRect(x, bottom, 1, 5);
        const text = shortTime(Math.round(t * 1e3) / 1e3, views.data.is_in_units);
        if (x < width - 30 && x > LEFT + 10) context.fillText(text, x, bottom + 8);
      }
    }
  }

  class Timeline extends Lanes {
    constructor(views, canvas) {
      const lanePx = Math.min(Math.max(Math.floor(560 / views.ranks.length), 10), 46);
      super(views, canvas, views.ranks, lanePx);
      this.weights = new Float64Array(looks.length);
    }

    draw() {
      const width = this.begin(), { context, views, lanePx } = this;
      for (let row = 0; row < this.shown; row++) {
        const middle = (row + 0.45) * lanePx;
        context.fillStyle = this.colours.idle;
        context.fillRect(LEFT, middle - 0.4 * lanePx, width - LEFT, 0.68 * lanePx);
        tracks.forEach(([top, bottom], track) => {
          const place = (row + this.top) * tracks.length + track;
          const height = Math.max((bottom - top) * lanePx, 1);
          this.drawTrack(views.offsets[place], views.offsets[place + 1], middle + top * lanePx, height, width - LEFT);
        });
      }
      this.finish(width);
    }

    /** Draws the events [first, last) of a track: boxes where they are wide enough, else a column of pixels at a time. */
    drawTrack(first, last, y, height, width) {
      const { context, views, scale, weights } = this, { start_ns: start, look } = views.columns;
      const { from, to, end } = views;
      let column = -1, filled = 0, most = 0, run = null;
      const finishRun = () => {
        if (run) this.fill(run.look, run.alpha, run.x, y, run.end - run.x, height);
        run = null;
      };
      const finishColumn = () => {
        if (column < 0) return;
        const alpha = Math.ceil(Math.min(Math.max(filled, 0.25), 1) * 4) / 4;
        if (run && run.end === column && run.look === most && run.alpha === alpha) run.end++;
        else {
          finishRun();
          run = { look: most, alpha, x: column, end: column + 1 };
        }
        column = -1;
      };
      for (let i = above(views.latest, from, first, last); i < last && start[i] < to; i++) {
        const left = (start[i] - from) * scale, right = (end[i] - from) * scale;
        if (right < 0) continue;
        if (right - left >= FINE_PX) {
          finishColumn();
          finishRun();
          const x = Math.max(left, 0), wide = Math.min(right, width) - x;
          this.fill(look[i], 1, x, y, Math.max(wide - (wide > 4 ? 0.6 : 0), 0.8), height);
          if (height >= 11 && right - left > 16) this.label(i, Math.max(left, 0), Math.min(right, width), y, height);
          continue;
        }
        const pixel = Math.max(Math.floor(left), 0);
        if (pixel !== column) {
          finishColumn();
          column = pixel;
          filled = 0;
          most = look[i];
          weights.fill(0);
        }
        filled += right - left;
        weights[look[i]] += right - left;
        if (weights[look[i]] > weights[most]) most = look[i];
      }
      finishColumn();
      finishRun();
    }

    fill(look, alpha, x, y, width, height) {
      this.context.globalAlpha = alpha;
      this.context.fillStyle = looks[look].colour;
      this.context.fillRect(LEFT + x, y, width, height);
      this.context.globalAlpha = 1;
    }

    label(i, left, right, y, height) {
      const { micro_batch: batch, look } = this.views.columns;
      if (batch[i] < 0) return;
      const text = String(batch[i]);
      if (text.length * 7 > right - left) return;
      this.context.font = "11px system-ui, sans-serif";
      this.context.textAlign = "center";
      this.context.textBaseline = "middle";
      this.context.fillStyle = looks[look[i]].text;
      this.context.fillText(text, LEFT + (left + right) / 2, y + height / 2 + 0.5);
    }

    /** Gives the event at a time on a lane, `part` of 1 down in it; the nearest within three pixels; -1 for none. */
    find(lane, part, time) {
      const { views } = this, { start_ns: start } = views.columns, near = 3 / this.scale;
      let found = -1, least = near;
      tracks.forEach(([top, bottom], track) => {
        const offset = part - 0.45, slack = Math.min(1.5 / this.lanePx, 0.03);
        if (offset < top - slack || offset > bottom + slack) return;
        const place = lane * tracks.length + track, first = views.offsets[place];
        for (let i = above(start, time + near, first, views.offsets[place + 1]) - 1; i >= first; i--) {
          if (views.latest[i] < time - near) break;
          const away = Math.max(start[i] - time, time - views.end[i], 0);
          if (away < least || (found < 0 && away <= least)) [found, least] = [i, away];
          if (away === 0) break;
        }
      });
      return found;
    }

    words(lane, part, time) {
      const i = this.find(lane, part, time);
      return i < 0 ? null : eventWords(this.views, i, this.ranks[lane]);
    }

    /** Gives where the middle of an event is on the screen. */
    pointOf(i) {
      const { offsets, from, columns, end } = this.views;
      const place = above(offsets, i, 0, offsets.length) - 1, lane = Math.floor(place / tracks.length);
      const [top, bottom] = tracks[place % tracks.length], box = this.canvas.getBoundingClientRect();
      return {
        x: box.left + LEFT + ((columns.start_ns[i] + end[i]) / 2 - from) * this.scale,
        y: box.top + (lane - this.top + 0.45 + (top + bottom) / 2) * this.lanePx,
      };
    }
  }

  function eventWords(views, i, rank) {
    const column = views.columns, kinds = views.data.timeline.kinds;
    const place = [`stage ${column.stage[i]}`];
    if (column.segment[i] >= 0) place.push(`segment ${column.segment[i]}`);
    if (column.micro_batch[i] >= 0) place.push(`micro-batch ${column.micro_batch[i]}`);
    place.push(`direction ${column.direction[i]}`, `step ${column.step[i]}`);
    const words = [`${kinds[column.kind[i]]} on rank ${rank}, ${views.data.source}`, place.join(", ")];
    const [begin, time] = [column.start_ns[i], column.duration_ns[i]].map((ns) => shortTime(ns, views.data.is_in_units));
    words.push(`begins at ${begin}, takes ${time}`);
    if (column.moved_bytes[i] > 0) words.push(`moves ${shortBytes(column.moved_bytes[i])}`);
    if (column.device_bytes[i] > 0) words.push(`at its end ${shortBytes(column.device_bytes[i])} on the device`);
    if (column.host_bytes[i] > 0) words.push(`at its end ${shortBytes(column.host_bytes[i])} in host memory`);
    return words;
  }

  class Memory extends Lanes {
    constructor(views, canvas, ranks, curves) {
      super(views, canvas, ranks, Math.min(Math.max(Math.floor(440 / ranks.length), 28), 90));
      Object.assign(this, { curves, curve: curves[0] });
      if (curves.length < 2) return;
      const choice = document.createElement("select");
      choice.setAttribute("aria-label", "which memory");
      curves.forEach((curve, number) => choice.add(new Option(curve.name, String(number))));
      choice.addEventListener("change", () => {
        this.curve = curves[Number(choice.value)];
        views.draw();
      });
      canvas.before(choice);
    }

    draw() {
      const width = this.begin(), { context, views, curve, lanePx, scale } = this;
      const { offsets, time_ns: time, value_bytes: value, peak_bytes: peak } = curve;
      for (let row = 0; row < this.shown; row++) {
        const lane = row + this.top, base = (row + 1) * lanePx - 2, last = offsets[lane + 1];
        let i = Math.max(above(time, views.from, offsets[lane], last) - 1, offsets[lane]);
        const y = (bytes) => base - (bytes / peak) * (lanePx - 7);
        const outline = [];
        while (i < last && time[i] < views.to) {
          const x = LEFT + Math.max((time[i] - views.from) * scale, 0), pixel = Math.floor(x);
          let low = value[i], high = value[i], next = i + 1;
          while (next < last && LEFT + (time[next] - views.from) * scale < pixel + 1) {
            low = Math.min(low, value[next]);
            high = Math.max(high, value[next++]);
          }
          const end = next < last ? LEFT + Math.min((time[next] - views.from) * scale, width - LEFT) : width;
          outline.push([x, low, high, value[next - 1], end]);
          i = next;
        }
        context.fillStyle = this.colours.area;
        for (const [x, , high, after, end] of outline) {
          context.fillRect(x, y(high), Math.min(1, end - x), base - y(high));
          context.fillRect(x, y(after), end - x, base - y(after));
        }
        context.fillStyle = this.colours.curve;
        for (const [x, low, high, after, end] of outline) {
          context.fillRect(x, y(high), 1, Math.max(y(low) - y(high), 1));
          context.fillRect(x, y(after) - 0.5, end - x, 1.2);
        }
        context.fillStyle = this.colours.line;
        context.fillRect(LEFT, base + 1, width - LEFT, 1);
      }
      this.finish(width);
      context.textAlign = "right";
      context.textBaseline = "top";
      context.fillText(`top of each lane: ${shortBytes(peak)}`, width - 4, 2);
    }

    words(lane, part, time) {
      const { offsets, time_ns: times, value_bytes: values, name } = this.curve;
      const i = above(times, time, offsets[lane], offsets[lane + 1]) - 1;
      if (i < offsets[lane]) return null;
      return [`rank ${this.ranks[lane]}: ${shortBytes(values[i])}`, name, `from ${shortTime(times[i], this.views.data.is_in_units)} on`];
    }
  }

  // ---- tables

  function sortTable(table, column, isAscending) {
    const body = table.tBodies[0];
    const key = (row) => {
      const cell = row.cells[column];
      return cell.dataset.value === undefined ? cell.textContent : Number(cell.dataset.value);
    };
    const isUnknown = (value) => value === "-" || value === "";
    const rows = [...body.rows].map((row) => [key(row), row]);
    rows.sort(([one], [other]) => {
      if (isUnknown(one) || isUnknown(other)) return Number(isUnknown(one)) - Number(isUnknown(other));
      const isNumeric = typeof one === "number" && typeof other === "number";
      const order = isNumeric ? one - other : String(one).localeCompare(String(other), "en", { numeric: true });
      return isAscending ? order : -order;
    });
    body.append(...rows.map(([, row]) => row));
  }

  for (const table of document.querySelectorAll("table.sorts")) {
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) =>
      head.addEventListener("click", () => {
        const isAscending = head.getAttribute("aria-sort") !== "ascending";
        for (const other of heads) other.removeAttribute("aria-sort");
        head.setAttribute("aria-sort", isAscending ? "ascending" : "descending");
        sortTable(table, column, isAscending);
      }),
    );
  }

  // ---- runs are unpacked when they come into sight

  function load(number) {
    if (!runs.has(number)) {
      const box = document.querySelector(`.views[data-run="${Number(number)}"]`);
      const views = new Views(box, JSON.parse(document.getElementById(`data-${Number(number)}`).textContent));
      runs.set(number, { views, done: views.load() });
    }
    return runs.get(number).done;
  }

  const sight = new IntersectionObserver((entries) => {
    for (const entry of entries)
      if (entry.isIntersecting) {
        sight.unobserve(entry.target);
        load(Number(entry.target.dataset.run));
      }
  }, { rootMargin: "400px" });
  for (const box of document.querySelectorAll(".views")) sight.observe(box);

  // ---- what the page says of itself; nothing here changes it but `load`

  const viewsOf = (number) => runs.get(number).views;
  window.gemsReport = Object.freeze({
    load: (number) => load(number).then(() => viewsOf(number).columns.start_ns.length),
    view: (number) => ({ from_ns: viewsOf(number).from, to_ns: viewsOf(number).to }),
    drawMs: (number) => viewsOf(number).drawMs,
    tip: () => (tip.hidden ? null : tip.textContent),
    pointOf: (number, i) => viewsOf(number).pictures[0].pointOf(i),
    event: (number, i) => {
      const { columns, offsets, ranks, data } = viewsOf(number);
      const values = Object.entries(columns).map(([name, column]) => [name, column[i]]);
      const lane = Math.floor((above(offsets, i, 0, offsets.length) - 1) / tracks.length);
      return { ...Object.fromEntries(values), rank: ranks[lane], kind: data.timeline.kinds[columns.kind[i]] };
    },
  });
})();
