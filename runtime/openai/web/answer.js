/* The answer: text that comes in pieces, and tokens that each own some of its characters. */

const ORIGINS = ["accepted", "recovered", "bonus", "plain"];

/** One answer in its element. A round is a list of tokens; its last one is no accepted draft, unless the answer ended. */
class Answer {
  constructor(element) {
    this.element = element;
    this.text = "";
    this.tokens = [];
    this.rounds = [];
    this.counts = Object.fromEntries(ORIGINS.map((origin) => [origin, 0]));
    this._unowned = []; // characters that no token has claimed yet
    this._next = 0; // the first token that may still claim some
    element.replaceChildren();
  }

  /** Takes a chunk: text, and for each new token its origin and its number of characters. */
  add(text, origins, lengths) {
    this.text += text;
    this._unowned.push(...text); // by code points, as the server counts
    origins.forEach((origin, index) => this._token(origin, lengths[index]));
    this._share();
  }

  /** Nothing more comes: what no token claims is shown all the same. */
  finish() {
    if (this._unowned.length) this.element.append(this._unowned.splice(0).join(""));
  }

  /** Marks the tokens of one round, and no others; null marks none. */
  light(round) {
    this._lit?.forEach((token) => token.span.classList.remove("lit"));
    this._lit = round;
    this._lit?.forEach((token) => token.span.classList.add("lit"));
  }

  _token(origin, length) {
    const last = this.rounds.at(-1)?.at(-1);
    if (!last || last.origin !== "accepted") this.rounds.push([]);
    const span = document.createElement("span");
    span.className = origin;
    span.dataset.round = this.rounds.length - 1;
    const token = { origin, span, missing: length };
    this.rounds.at(-1).push(token);
    this.tokens.push(token);
    this.counts[origin] += 1;
    this.element.append(span);
  }

  _share() {
    for (; this._next < this.tokens.length; this._next += 1) {
      const token = this.tokens[this._next];
      const piece = this._unowned.splice(0, token.missing);
      token.missing -= piece.length;
      if (piece.length) token.span.append(piece.join(""));
      if (token.missing) return; // held back by the server, or cut by a stop string
    }
  }
}

/** What a round did, in words. */
function describe(round, number) {
  const count = round.filter((token) => token.origin === "accepted").length;
  const end = round.at(-1).origin;
  if (end === "plain") return `Round ${number}: 1 token, without drafts`;
  const parts = [`${count} accepted`];
  if (end !== "accepted") parts.push(end === "bonus" ? "1 bonus, since all drafts stood" : "1 recovered, in place of a refused draft");
  return `Round ${number}: ${round.length} ${round.length === 1 ? "token" : "tokens"}, ${parts.join(" and ")}`;
}
