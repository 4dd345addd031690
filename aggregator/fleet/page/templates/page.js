"use strict";
// Puts in the parts that changed, and words the times anew. The server has escaped every text in them.
let ahead = document.body.dataset.at * 1000 - Date.now();
const live = document.getElementById("live");

function words(seconds) {
  for (const [length, unit] of [[86400, "d"], [3600, "h"], [60, "min"]])
    if (seconds >= length) return Math.round(seconds / length) + " " + unit + " ago";
  return "now";
}

function tell() {
  const now = (Date.now() + ahead) / 1000;
  for (const each of document.querySelectorAll("time[data-at]"))
    each.textContent = words(Math.max(0, now - each.dataset.at));
}

const source = new EventSource("events");
source.onopen = () => { live.className = "on"; live.textContent = "live"; };
source.onerror = () => { live.className = "off"; live.textContent = "not live: no connection to the fleet service"; };
source.onmessage = (message) => {
  const { at, parts } = JSON.parse(message.data);
  ahead = at * 1000 - Date.now();
  for (const [name, html] of Object.entries(parts)) document.getElementById(name).innerHTML = html;
  tell();
};
tell();
setInterval(tell, 5000);
