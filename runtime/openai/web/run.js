/* One run: its settings, its answer, and what the server told about it. */

const WINDOW = 1; // seconds that a speed is taken over

class Run {
  constructor(number, settings, answer) {
    this.number = number;
    this.settings = settings;
    this.answer = answer;
    this.metrics = null;
    this.finish = null;
    this.line = []; // [seconds of decoding, tokens/s]
    this._points = []; // [seconds of decoding, tokens]
  }

  get label() {
    return `#${this.number}`;
  }

  /** Takes a chunk of the stream, whichever of the two kinds. */
  add(chunk) {
    const choice = chunk.choices[0];
    const { token_origins: origins = [], token_lengths: lengths = [], metrics } = chunk.magicdec ?? {};
    if (choice) {
      this.answer.add(choice.text ?? choice.delta?.content ?? "", origins, lengths);
      this.finish = choice.finish_reason ?? this.finish;
    }
    if (metrics) this._measure(metrics);
  }

  /** Tokens/s from the first token to the last, or 0. */
  get speed() {
    const { decode_seconds: seconds, num_output_tokens: tokens } = this.metrics ?? {};
    return seconds ? (tokens - 1) / seconds : 0;
  }

  /** Tokens that a round yields on average, rounds without drafts counted too. */
  get tokensARound() {
    const { rounds, tokens } = this.answer;
    return rounds.length ? tokens.length / rounds.length : 0;
  }

  /** The same without those rounds; 0 if all were such. */
  get acceptanceLength() {
    const rounds = this.answer.rounds.filter((round) => round[0].origin !== "plain");
    return rounds.length ? rounds.flat().length / rounds.length : 0;
  }

  /** Whether another run must give the same answer: all but the draft length is equal, and no draw is fresh. */
  mustEqual(other) {
    const key = ({ draft, ...rest }) => JSON.stringify(rest);
    const repeatable = this.settings.temperature === 0 || this.settings.seed !== "";
    return repeatable && key(this.settings) === key(other.settings);
  }

  _measure(metrics) {
    this.metrics = metrics;
    const now = metrics.decode_seconds;
    this._points.push([now, metrics.num_output_tokens]);
    while (this._points.length > 2 && this._points[1][0] <= now - WINDOW) this._points.shift();
    const [time, tokens] = this._points[0];
    if (now > time && now >= WINDOW / 10) this.line.push([now, (metrics.num_output_tokens - tokens) / (now - time)]);
  }
}
