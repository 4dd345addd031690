"use strict";
// Shows one image after the other, and sends what is tapped. The token is in the part of the address after #, which a
// browser sends to nobody; it goes along as a header. Every text is put in as a text, never as HTML.
const $ = (id) => document.getElementById(id);
const token = location.hash.slice(1);
let shown = null;
let busy = true; // a second tap, meant for the image before, must not label the next one
const DOUBLE_TAP_MS = 400;

async function ask(path, body) {
  const headers = { Authorization: "Bearer " + token };
  const answer = await fetch(path, { method: "POST", headers, body: JSON.stringify(body || {}) });
  if (answer.headers.get("Content-Type") !== "application/json") return answer.blob();
  const made = await answer.json();
  if (!answer.ok) throw new Error(made.error);
  return made;
}

function button(text, key, label) {
  const made = document.createElement("button");
  made.type = "button";
  made.append(text);
  if (key) made.append(Object.assign(document.createElement("kbd"), { textContent: key }));
  made.onclick = () => tap(label);
  return made;
}

async function show(next) {
  shown = next;
  const { image, guess, kind, wrong } = next;
  const what = wrong ? "alarm" : kind;
  $("waiting").textContent = next.waiting === 1 ? `1 ${what} waits` : `${next.waiting} ${what}s wait`;
  $("name").textContent = image || "";
  $("question").textContent = image ? (wrong && guess ? `Was this ${guess[0]}?` : "What is this?") : `All new ${what}s are done`;
  $("aside").firstChild.textContent = wrong ? "None of these" : "Not usable";
  $("said").textContent = next.said;
  $("choices").hidden = $("aside").hidden = !image;
  $("again").hidden = Boolean(image);
  $("play").hidden = !image || kind !== "clip";
  $("undo").hidden = !next.undo;
  $("guess").hidden = !guess;
  if (guess) {
    const by = document.createElement("small");
    by.textContent = Math.round(100 * guess[1]) + " % sure, by " + next.by;
    $("guess").replaceChildren(guess[0], Object.assign(document.createElement("kbd"), { textContent: "Enter" }), by);
  }
  $("classes").replaceChildren(...next.classes.map((name, place) => button(name, place < 9 ? String(place + 1) : "", name)));
  $("unreadable").hidden = !next.unreadable.length;
  $("unreadable").firstChild.textContent = `Files in the inbox that are no readable ${kind}s: ` + next.unreadable.length;
  $("unreadable").lastChild.replaceChildren(
    ...next.unreadable.map((each) => Object.assign(document.createElement("li"), { textContent: each })));
  for (const each of [$("image"), $("clip")]) {
    each.hidden = true;
    if (each.src) URL.revokeObjectURL(each.src);
    each.removeAttribute("src");
  }
  if (!image) return;
  if (kind === "clip") {
    $("clip").src = URL.createObjectURL(await ask("clip", { image, version: next.version }));
    $("clip").hidden = false;
  }
  $("image").src = URL.createObjectURL(await ask("image", { image, version: next.version }));
  $("image").alt = `The new ${kind} ${image}`;
  await $("image").decode();
  $("image").hidden = false;
}

async function act(work) {
  if (busy) return;
  await begin(work);
}

async function begin(work) {
  busy = true;
  for (const each of document.querySelectorAll("button")) each.disabled = true;
  try {
    await show(await work());
  } catch (error) {
    try { await show(await ask("next")); } catch { $("choices").hidden = true; $("again").hidden = false; }
    const silent = error instanceof TypeError; // as fetch says it
    $("said").textContent = silent ? "The board does not answer. Does hushfleet-edge label still run?" : error.message;
  }
  await new Promise((done) => setTimeout(done, DOUBLE_TAP_MS)); // the image has come, perhaps within a double tap
  for (const each of document.querySelectorAll("button")) each.disabled = false;
  busy = false;
}

const tap = (label) => act(() => ask("tap", { image: shown.image, version: shown.version, label }));
const undo = () => act(() => ask("undo"));
const play = () => { $("clip").currentTime = 0; $("clip").play(); };
const again = () => act(() => ask("next"));
$("guess").onclick = () => tap(shown.guess[0]);
$("aside").onclick = () => tap("");
$("undo").onclick = undo;
$("play").onclick = play;
$("again").onclick = again;

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.repeat || !shown) return;
  const key = event.key.toLowerCase();
  const place = Number(key) - 1;
  if (key === "u") undo();
  else if (key === "r") again();
  else if (!shown.image) return;
  else if (key === "0") tap("");
  else if (key === "p" && shown.kind === "clip") play();
  else if (key === "enter" && shown.guess && event.target.tagName !== "BUTTON" && event.target.tagName !== "SUMMARY") tap(shown.guess[0]);
  else if (/^[1-9]$/.test(key) && place < shown.classes.length) tap(shown.classes[place]);
});

begin(() => ask("next"));
