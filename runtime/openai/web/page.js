/* The page: reads the form, runs a request, shows what comes. Model text enters as text nodes only. */

const $ = (id) => document.getElementById(id);
const roundsPlot = new RoundsPlot($("rounds"));
const ratePlot = new RatePlot($("rate"));
const HINT = "Point at a token to see its round; or focus the answer and press the arrow keys.";
const MAX_ROWS = 8;
let served = null; // the model as the server lists it
let run = null; // the newest
let previous = null; // the one before it
let aborter = null; // of the request that goes on
let lit = null; // the number of the round that is shown
let drawing = false;
let pinned = true; // the answer scrolls along, unless its reader has scrolled up
let scrolled = 0; // how far it was scrolled

/** Asks who serves, which also tells whether a key is needed. */
async function connect() {
  try {
    served = await model($("key").value);
  } catch (error) {
    fail(error);
    return false;
  }
  $("error").hidden = true;
  $("model").textContent = served.id;
  offerLengths(served.magicdec);
  setStatus("Ready");
  return true;
}

/** Fills the choice of draft lengths with what this engine can do. */
function offerLengths({ num_draft_tokens: own, max_draft_len: most }) {
  const select = $("draft");
  if (select.options.length > 2) return;
  select.options[0].textContent = own === "auto" ? "automatic" : `server's own (${own})`;
  for (let length = 1; length <= most; length += 1) select.add(new Option(length, length));
}

/** What the form asks for. */
function settings() {
  return {
    mode: new FormData($("form")).get("mode"),
    prompt: $("prompt").value,
    draft: $("draft").value,
    maxTokens: Number($("max-tokens").value),
    temperature: Number($("temperature").value),
    seed: $("seed").value,
  };
}

/** Path and body of the request with these settings. */
function request({ mode, prompt, draft, maxTokens, temperature, seed }) {
  const body = {
    model: served.id,
    stream: true,
    magicdec_details: true,
    temperature,
    ...(seed && { seed: Number(seed) }),
    ...(draft && { num_draft_tokens: Number(draft) }),
  };
  if (mode === "completion") return ["v1/completions", { ...body, prompt, max_tokens: maxTokens }];
  return ["v1/chat/completions", { ...body, messages: [{ role: "user", content: prompt }], max_completion_tokens: maxTokens }];
}

async function generate() {
  if (aborter) return;
  if (!served && !(await connect())) return;
  if (aborter) return; // asked twice while connecting
  const asked = settings();
  begin(asked);
  try {
    for await (const chunk of chunks(...request(asked), $("key").value, aborter.signal)) {
      run.add(chunk);
      setStatus("Generating");
      soon();
    }
    end(run.finish === "length" ? "Stopped at max tokens" : "Done");
  } catch (error) {
    if (error.name !== "AbortError") fail(error);
    end(error.name === "AbortError" ? "Stopped" : "Failed");
  }
}

function begin(asked) {
  aborter = new AbortController();
  previous = run?.answer.tokens.length ? run : previous;
  run = new Run((previous?.number ?? 0) + 1, asked, new Answer($("answer")));
  lit = null;
  pinned = true;
  $("error").hidden = true;
  $("answer").classList.add("running");
  $("generate").disabled = true;
  $("stop").disabled = false;
  setStatus("Reading the prompt");
  show();
}

function end(status) {
  aborter = null;
  run.answer.finish();
  $("answer").classList.remove("running");
  $("generate").disabled = false;
  $("stop").disabled = true;
  if (run.answer.tokens.length) record();
  setStatus(status);
  show();
}

function stop() {
  aborter?.abort();
}

/** Tells an error in words, and asks for a key where one is missing. */
function fail(error) {
  const known = error instanceof ServerError;
  if (!known) console.error(error);
  $("error").textContent = known ? error.message : `The page cannot make sense of the answer: ${error.message}`;
  $("error").hidden = false;
  setStatus(error.status === 401 ? "Needs an API key" : "Not ready");
  if (error.status !== 401) return;
  served = null;
  $("key-field").hidden = false;
  $("key").focus();
}

/** Changes a text that is read aloud when it changes. */
function say(id, text) {
  if ($(id).textContent !== text) $(id).textContent = text;
}

function setStatus(text) {
  say("status", text);
  document.title = text === "Ready" ? "MagicDec" : `${text} · MagicDec`;
}

/** Draws with the next frame, at most once a frame. */
function soon() {
  if (drawing) return;
  drawing = true;
  requestAnimationFrame(() => {
    drawing = false;
    show();
  });
}

function show() {
  const { counts, rounds } = run.answer;
  for (const origin of ORIGINS) document.querySelector(`[data-count="${origin}"]`).textContent = counts[origin];
  figures(run.metrics);
  $("mean").textContent = means();
  roundsPlot.draw(rounds, run.tokensARound);
  ratePlot.draw(run, previous);
  light(lit);
  if (pinned && aborter) $("answer").scrollTop = $("answer").scrollHeight;
}

/** Over all rounds, and over those with drafts where that is something else. */
function means() {
  const { tokensARound: all, acceptanceLength: drafted } = run;
  if (!all) return "";
  return `mean ${all.toFixed(2)}${drafted > all ? `; with drafts ${drafted.toFixed(2)}` : ""}`;
}

function figures(metrics) {
  const { num_accepted_tokens: accepted = 0, num_draft_tokens: drafted = 0, prefill_seconds: first } = metrics ?? {};
  $("length").textContent = run.tokensARound ? run.tokensARound.toFixed(2) : "–";
  $("speed").textContent = run.speed ? run.speed.toFixed(1) : "–";
  measure($("accepted"), metrics ? `${accepted}` : "–", metrics && ` of ${drafted}${drafted ? `, ${percent(accepted, drafted)}` : ""}`);
  measure($("first"), ...duration(first));
}

/** Number and unit. */
function duration(seconds) {
  if (seconds === undefined) return ["–"];
  return seconds < 1 ? [Math.round(1000 * seconds), " ms"] : [seconds.toFixed(2), " s"];
}

/** A figure with its smaller rest. */
function measure(element, figure, rest) {
  const small = document.createElement("small");
  small.textContent = rest || "";
  element.replaceChildren(figure, small);
}

function percent(part, whole) {
  return `${Math.round((100 * part) / whole)} %`;
}

/** A row of the table of runs; an answer that must equal the one before is compared with it. */
function record() {
  const { num_accepted_tokens: accepted, num_draft_tokens: drafted } = run.metrics;
  const cells = [
    run.number,
    run.settings.draft === "" ? $("draft").options[0].textContent : run.settings.draft,
    run.answer.tokens.length,
    run.speed.toFixed(1),
    run.tokensARound.toFixed(2),
    drafted ? percent(accepted, drafted) : "–",
    comparison(),
  ];
  const row = document.createElement("tr");
  for (const cell of cells) row.insertCell().textContent = cell;
  const body = $("runs").tBodies[0];
  body.append(row);
  if (body.rows.length > MAX_ROWS) body.rows[0].remove();
  $("runs-figure").hidden = false;
}

function comparison() {
  if (!previous || !run.mustEqual(previous)) return "";
  const [short, long] = [run.answer.text, previous.answer.text].sort((a, b) => a.length - b.length);
  if (short === long) return `same as ${previous.label}`;
  return long.startsWith(short) ? `begins as ${previous.label}` : `differs from ${previous.label}`;
}

/** Shows one round in the answer, in the plot and in words; null shows none. */
function light(index) {
  lit = index;
  run.answer.light(index === null ? null : run.answer.rounds[index]);
  roundsPlot.light(index);
  say("round", index === null ? HINT : describe(run.answer.rounds[index], index + 1));
}

function step(event) {
  const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (!move || !run?.answer.rounds.length) return;
  event.preventDefault();
  const last = run.answer.rounds.length - 1;
  light(lit === null ? (move > 0 ? 0 : last) : Math.min(last, Math.max(0, lit + move)));
  run.answer.rounds[lit][0].span.scrollIntoView({ block: "nearest" });
}

function setTheme(next) {
  $("theme").textContent = `Theme: ${next}`;
  document.documentElement.dataset.theme = next;
}

$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  generate();
});
$("stop").addEventListener("click", stop);
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") stop();
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) $("form").requestSubmit();
});
$("answer").addEventListener("keydown", step);
$("answer").addEventListener("scroll", ({ target }) => {
  const atEnd = target.scrollHeight - target.scrollTop - target.clientHeight < 30;
  pinned = atEnd || (pinned && target.scrollTop >= scrolled); // text that came since the last event scrolls nobody up
  scrolled = target.scrollTop;
});
$("answer").addEventListener("mouseover", (event) => {
  if (event.target.dataset.round !== undefined) light(Number(event.target.dataset.round));
});
$("answer").addEventListener("mouseleave", () => run && light(null));
$("rounds").addEventListener("mousemove", (event) => run && light(roundsPlot.at(event.clientX)));
$("rounds").addEventListener("mouseleave", () => run && light(null));
$("colours").addEventListener("change", (event) => $("answer").classList.toggle("coloured", event.target.checked));
$("key").addEventListener("keydown", (event) => {
  if (event.key !== "Enter") return;
  event.preventDefault(); // it shall not generate
  $("prompt").focus(); // which also tells of the change
});
$("key").addEventListener("change", () => {
  sessionStorage.setItem("key", $("key").value);
  if ($("key").value) connect();
});
$("theme").addEventListener("click", () => {
  const order = ["system", "light", "dark"];
  const next = order[(order.indexOf(localStorage.getItem("theme") ?? "system") + 1) % order.length];
  localStorage.setItem("theme", next);
  setTheme(next);
});
new ResizeObserver(() => run && soon()).observe($("rounds"));
setTheme(localStorage.getItem("theme") ?? "system");
roundsPlot.draw([], 0);
ratePlot.draw({ line: [] }, null);
$("key").value = sessionStorage.getItem("key") ?? "";
$("key-field").hidden = !$("key").value;
connect();
