/* Two plots in SVG: bars of the rounds, and lines of speed. Both are drawn anew for each chunk. */

const SVG = "http://www.w3.org/2000/svg";
const LEFT = 26; // room for the labels of the vertical axis
const BAR = { most: 16, least: 4 }; // width with its gap, in pixels

/** Makes an element of a drawing. */
function shape(parent, name, attributes, text) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  parent.append(element);
  return element;
}

/** An empty drawing: its size in pixels, lines at these values, and the scale that they give. */
function canvas(svg, most, ticks) {
  const { width, height } = svg.getBoundingClientRect();
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.replaceChildren();
  const y = (value) => height - 6 - (value / most) * (height - 18);
  for (const tick of ticks) {
    shape(svg, "path", { class: "grid", d: `M${LEFT} ${Math.round(y(tick)) + 0.5}H${width}` });
    shape(svg, "text", { x: LEFT - 6, y: y(tick) + 4, "text-anchor": "end" }, tick);
  }
  return { width, height, y };
}

/** About three round numbers from 0 up to at least `most`. */
function ticksUpTo(most, whole) {
  const raw = most / 3;
  const power = 10 ** Math.floor(Math.log10(raw));
  let step = [1, 2, 5, 10].map((factor) => factor * power).find((candidate) => candidate >= raw);
  if (whole) step = Math.max(1, Math.round(step));
  return Array.from({ length: Math.ceil(most / step) + 1 }, (_, index) => +(index * step).toPrecision(6));
}

/** Bars of tokens, a round each, the newest at the right; as many as there is room for. */
class RoundsPlot {
  constructor(svg) {
    this.svg = svg;
  }

  draw(rounds, mean) {
    const most = Math.max(4, ...rounds.map((round) => round.length));
    const ticks = ticksUpTo(most, true);
    const { width, y } = canvas(this.svg, ticks.at(-1), ticks);
    const room = width - LEFT;
    this.pitch = Math.max(BAR.least, Math.min(BAR.most, room / Math.max(rounds.length, 1)));
    this.first = Math.max(0, rounds.length - Math.floor(room / this.pitch));
    this.last = rounds.length - 1;
    for (const origin of ORIGINS) shape(this.svg, "path", { class: origin, d: this._cells(rounds, origin, y) });
    if (mean) shape(this.svg, "path", { class: "mean", d: `M${LEFT} ${y(mean)}H${width}` });
    this._mark = shape(this.svg, "rect", { class: "mark", y: 0, width: this.pitch, height: y(0), visibility: "hidden" });
    const told = rounds.length ? `mean ${mean.toFixed(2)} over ${rounds.length} rounds` : "none yet";
    this.svg.setAttribute("aria-label", `Tokens of each round: ${told}`);
  }

  /** Marks a round's bar; none if it is out of sight. */
  light(index) {
    const shown = index !== null && index >= this.first && index <= this.last;
    this._mark?.setAttribute("visibility", shown ? "visible" : "hidden");
    if (shown) this._mark.setAttribute("x", LEFT + (index - this.first) * this.pitch);
  }

  /** The round at a horizontal place of the page, or null. */
  at(clientX) {
    const index = this.first + Math.floor((clientX - this.svg.getBoundingClientRect().left - LEFT) / this.pitch);
    return index >= this.first && index <= this.last ? index : null;
  }

  _cells(rounds, origin, y) {
    const gap = this.pitch > 6 ? 2 : 1;
    const tall = y(0) - y(1);
    const cut = tall > 8 ? 1 : 0;
    let path = "";
    for (let index = this.first; index <= this.last; index += 1) {
      const x = LEFT + (index - this.first) * this.pitch;
      rounds[index].forEach((token, level) => {
        if (token.origin === origin) path += `M${x} ${y(level)}h${this.pitch - gap}v${cut - tall}h${gap - this.pitch}z`;
      });
    }
    return path;
  }
}

/** Lines of tokens/s over the seconds of decoding: the run that goes on, and the one before it. */
class RatePlot {
  constructor(svg) {
    this.svg = svg;
  }

  /** now, before: {label, line: [[seconds, tokens/s], ...]}; before may be null. */
  draw(now, before) {
    const lines = [before, now].filter((run) => run?.line.length);
    const values = lines.flatMap((run) => run.line.map((point) => point[1]));
    const ticks = ticksUpTo(Math.max(4, ...values));
    const { width, height, y } = canvas(this.svg, ticks.at(-1), ticks);
    const seconds = Math.max(1, ...lines.map((run) => run.line.at(-1)[0]));
    const x = (time) => LEFT + (time / seconds) * (width - LEFT - 34);
    for (const run of lines) this._line(run, run === now ? "now" : "before", x, y);
    if (lines.length) shape(this.svg, "text", { x: x(seconds), y: height + 8, "text-anchor": "end" }, `${seconds.toFixed(1)} s`);
    const told = now.line.length ? `${Math.round(now.line.at(-1)[1])} now` : "none yet";
    this.svg.setAttribute("aria-label", `Tokens per second: ${told}`);
  }

  _line(run, kind, x, y) {
    const d = run.line.map(([time, rate], index) => `${index ? "L" : "M"}${x(time).toFixed(1)} ${y(rate).toFixed(1)}`);
    shape(this.svg, "path", { class: kind, d: d.join("") });
    const [time, rate] = run.line.at(-1);
    shape(this.svg, "text", { class: kind, x: x(time) + 6, y: y(rate) + 4 }, run.label);
  }
}
