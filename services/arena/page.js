// The arena's page. A vote is kept in localStorage until the server has stored it, so neither a reload nor a lost
// network loses it. Texts of models are only ever set as textContent.
"use strict";

const AHEAD = 3; // comparisons held ready, the shown one included
const $ = (id) => document.getElementById(id);
let rater = null;
let queue = []; // the first one is shown
let past = []; // voted on in this tab, for undo
let state = "waiting"; // of the server, once the queue is empty
let [filling, sending, lastVote, failures] = [false, false, 0, 0];
let [fillTimer, sendTimer] = [0, 0];

// Requests

async function api(path, body) {
  const options = { headers: { "X-Arena": "1" }, signal: AbortSignal.timeout(15000) };
  if (body !== undefined) {
    Object.assign(options, { method: "POST", body: JSON.stringify(body) });
    options.headers["Content-Type"] = "application/json";
  }
  const response = await fetch("api/" + path, options);
  if (response.ok) return response.json();
  const detail = (await response.json().catch(() => ({}))).detail;
  const text = typeof detail === "string" ? detail : "The server refused this.";
  throw Object.assign(new Error(text), { status: response.status });
}

const newId = () =>
  Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) => byte.toString(16).padStart(2, "0")).join("");

// Votes that the server has not confirmed: one entry each, so that two tabs do not overwrite each other's

const prefix = () => `arena ${rater} `;

function unsent() {
  const keys = Object.keys(localStorage).filter((key) => key.startsWith(prefix()));
  return keys.map((key) => ({ key, ...JSON.parse(localStorage.getItem(key)) })).sort((a, b) => a.time - b.time);
}

function record(path, body) {
  const time = Math.max(Date.now(), ...unsent().map((action) => action.time + 1)); // in order, also within a millisecond
  localStorage.setItem(prefix() + body.id, JSON.stringify({ path, body, time }));
  showSaved();
  send();
}

async function send() {
  if (sending || !rater) return;
  sending = true;
  for (let action; (action = unsent()[0]); ) {
    try {
      showProgress(await api(action.path, action.body));
    } catch (error) {
      if (error.status === 401) { showLogin(); break; }
      if (![403, 404, 422].includes(error.status)) { retry(); break; }
      announce(`A vote was refused: ${error.message}`);
    }
    failures = 0;
    localStorage.removeItem(action.key);
    showSaved();
    showResults();
  }
  sending = false;
}

function retry() {
  failures += 1;
  showSaved();
  clearTimeout(sendTimer);
  sendTimer = setTimeout(send, Math.min(500 * 2 ** failures, 10000));
}

// Comparisons

async function fill() {
  if (filling || !rater) return;
  filling = true;
  let pause = 0;
  try {
    while (queue.length < AHEAD) {
      const skip = new Set([...queue.map((comparison) => comparison.id), ...unsent().map((action) => action.body.comparison)]);
      const answer = await api("next?" + new URLSearchParams([...skip].map((id) => ["skip", id])));
      if (!answer.comparison) {
        state = answer.state;
        pause = state === "waiting" ? 1000 : 10000; // somebody may type a prompt
        break;
      }
      queue.push(answer.comparison);
      show();
    }
  } catch (error) {
    if (error.status === 401) showLogin();
    else { state = "offline"; pause = 2000; }
  }
  filling = false;
  if (rater) show();
  clearTimeout(fillTimer);
  if (pause) fillTimer = setTimeout(fill, pause);
}

let shown = null;

function show() {
  const current = queue[0];
  $("comparison").hidden = !current;
  $("message").hidden = Boolean(current);
  for (const button of $("votes").querySelectorAll("[data-choice]")) button.disabled = !current;
  $("undo").disabled = !past.length;
  if (!current) { shown = null; return showMessage(); }
  if (shown === current.id) return;
  shown = current.id;
  const several = current.messages.length > 1;
  $("prompt").replaceChildren(...current.messages.flatMap(({ role, content }) => [
    ...(several ? [element("span", "role", role)] : []), element("p", "text", content),
  ]));
  for (const side of ["left", "right"]) {
    $(side).textContent = current[side].trim() ? current[side] : "(empty answer)";
    $(side).classList.toggle("empty", !current[side].trim());
  }
  scrollTo(0, 0);
  $("prompt").scrollTop = 0;
}

function element(tag, name, text) {
  const node = document.createElement(tag);
  node.className = name;
  node.textContent = text;
  return node;
}

const MESSAGES = {
  waiting: ["The models are answering", "The next comparison appears here by itself."],
  done: ["You have voted on every comparison. Thank you!", "Ask your own prompt below for more, or see the results."],
  failed: ["The answers cannot be computed", "The terminal of the server shows why."],
  offline: ["The server cannot be reached", "Your votes are kept and sent as soon as it is back."],
};

function showMessage() {
  [$("message-title").textContent, $("message-text").textContent] = MESSAGES[state];
}

function choose(choice) {
  const now = Date.now();
  if (!queue.length || now - lastVote < 200) return; // a double click is one vote
  lastVote = now;
  const voted = queue.shift();
  remember([...past, voted]);
  record("vote", { id: newId(), comparison: voted.id, choice });
  announce("Next comparison");
  show();
  fill();
}

function undo() {
  if (!past.length) return;
  const last = past.at(-1);
  remember(past.slice(0, -1));
  queue.unshift(last);
  record("undo", { id: newId(), comparison: last.id });
  announce("Vote withdrawn");
  show();
}

function remember(list) {
  past = list.slice(-20);
  try {
    sessionStorage.setItem(prefix() + "past", JSON.stringify(past));
  } catch { /* too long for the browser: undo then ends at a reload */ }
}

// Figures

const percent = (share) => `${(100 * share).toFixed(0)}%`;
const counted = (number, noun) => `${number} ${noun}${number === 1 ? "" : "s"}`;

function showProgress({ labelled, total, yours }) {
  $("count").textContent = `${labelled} of ${total} labelled · ${yours} by you`;
  $("bar").value = total ? labelled / total : 0;
}

async function showResults() {
  if (!rater || document.hidden || !$("results").open) return;
  const results = await api("progress?results=1").catch(() => null);
  if (!results) return;
  const { win_rate: wins, agreement, raters, votes, identical } = results;
  showProgress(results);
  $("rate-title").textContent = results.second === "sample" ? "Second sample's win rate" : "Challenger's win rate";
  $("rate").textContent = wins ? percent(wins.rate) : "–";
  $("range").setAttribute("x", wins ? 100 * wins.low : 0);
  $("range").setAttribute("width", wins ? Math.max(100 * (wins.high - wins.low), 1) : 0);
  $("rate-note").textContent = wins
    ? `95% interval ${percent(wins.low)} to ${percent(wins.high)} over ${counted(wins.comparisons, "comparison")}` +
      (identical ? `, ${identical} of them with identical answers, which are ties` : "") +
      `. Votes: ${votes.second ?? 0} for, ${votes.first ?? 0} against, ${votes.tie ?? 0} tie, ` +
      `${votes.both_bad ?? 0} both bad.`
    : "No votes yet.";
  $("agreement").textContent = agreement.comparisons ? percent(agreement.agreement) : "–";
  const alpha = agreement.alpha === null ? "undefined (all votes are the same)" : agreement.alpha.toFixed(2);
  $("agreement-note").textContent = agreement.comparisons
    ? `of the pairs of votes on ${counted(agreement.comparisons, "comparison")} with two or more votes. ` +
      `Krippendorff's alpha: ${alpha}.`
    : "No comparison has two votes yet.";
  $("raters").replaceChildren(...Object.entries(raters).map(([name, count]) => {
    const line = document.createElement("li");
    line.append(element("span", "", name === rater ? `${name} (you)` : name), element("span", "", count));
    return line;
  }));
}

function showSaved() {
  const waiting = unsent().length;
  const late = waiting > 0 && failures > 0;
  $("saved").textContent = late ? `${waiting} not sent yet, kept on this device` : waiting ? "saving…" : "all saved";
  $("saved").classList.toggle("unsent", late);
}

const announce = (text) => { $("live").textContent = text; };

// Login

function showLogin() {
  rater = null;
  for (const id of ["comparison", "message", "more", "votes", "count", "saved", "who"]) $(id).hidden = true;
  $("login").hidden = false;
  const form = $("login").querySelector("form");
  form.token.value ||= decodeURIComponent(location.hash.replace(/^#token=/, ""));
  form.name.focus();
}

function enter(progress) {
  rater = progress.rater;
  history.replaceState(null, "", location.pathname); // the token stays out of the browser's history
  queue = [];
  shown = null;
  state = "waiting";
  past = JSON.parse(sessionStorage.getItem(prefix() + "past") ?? "[]");
  $("login").hidden = true;
  for (const id of ["more", "votes", "count", "saved", "who"]) $(id).hidden = false;
  $("name").textContent = rater;
  showProgress(progress);
  showSaved();
  send().then(fill); // votes of an earlier visit first: their comparisons are not shown again
}

async function boot() {
  try {
    enter(await api("progress"));
  } catch (error) {
    if (error.status === 401) return showLogin();
    state = "offline";
    $("message").hidden = false;
    showMessage();
    setTimeout(boot, 2000);
  }
}

// Events

$("login").querySelector("form").addEventListener("submit", async (event) => {
  event.preventDefault();
  const form = event.target;
  try {
    enter(await api("login", { name: form.name.value.trim(), token: form.token.value.trim() }));
    $("login-error").textContent = form.token.value = "";
  } catch (error) {
    $("login-error").textContent = error.status ? error.message : "The server cannot be reached.";
  }
});

$("logout").addEventListener("click", async () => {
  if (unsent().length && !confirm("Votes that are not sent yet stay on this device until you log in again.")) return;
  await api("logout", {}).then(showLogin, () => announce("The server cannot be reached."));
});

$("ask").querySelector("form").addEventListener("submit", async (event) => {
  event.preventDefault();
  try {
    await api("prompt", { text: $("question").value });
    $("question").value = "";
    $("asked").textContent = "Asked. You get its answers as soon as they are there.";
    queue = queue.slice(0, 1); // the rater's own prompt comes next
    fill();
  } catch (error) {
    $("asked").textContent = error.status ? error.message : "The server cannot be reached; your prompt is still here.";
  }
});

$("votes").addEventListener("click", (event) => {
  const button = event.target.closest("button");
  if (button?.id === "undo") undo();
  else if (button?.dataset.choice) choose(button.dataset.choice);
});

const KEYS = { 1: "left", ArrowLeft: "left", 2: "right", ArrowRight: "right", 3: "tie", 4: "both_bad" };

document.addEventListener("keydown", (event) => {
  const typing = event.target.closest("input, textarea");
  if (!rater || typing || event.repeat || event.ctrlKey || event.metaKey || event.altKey) return;
  if (KEYS[event.key]) choose(KEYS[event.key]);
  else if (event.key.toLowerCase() === "u") undo();
  else return;
  event.preventDefault();
});

$("results").addEventListener("toggle", showResults);
setInterval(showResults, 5000); // votes of others
addEventListener("online", () => { send(); fill(); });
boot();
