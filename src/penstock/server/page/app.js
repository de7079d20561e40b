// The page's frame: views, colours, keyboard, the server's state, and the API key.

import { askKey } from "./net.js";
import * as chat from "./chat.js";
import * as room from "./room.js";

const $ = id => document.getElementById(id);

function view(name) {
  for (const one of ["chat", "room"]) {
    $(one).hidden = one !== name;
    $(`tab-${one}`).setAttribute("aria-selected", String(one === name));
  }
  history.replaceState(null, "", name === "chat" ? location.pathname : "#room");
  name === "room" ? room.watch() : room.leave();
}

function colours(theme) {
  document.documentElement.dataset.theme = theme;
  localStorage.setItem("theme", theme);
}

async function look() {
  const state = $("status");
  try {
    const answer = await fetch("ready");
    state.textContent = answer.ok ? "ready" : (await answer.json()).error.message;
    state.className = answer.ok ? "good" : "bad";
  } catch {
    state.textContent = "no answer";
    state.className = "bad";
  }
}

const KEYS = { 1: () => view("chat"), 2: () => view("room"), n: () => (view("chat"), chat.load()), s: () => $("tune").click() };

$("tab-chat").onclick = () => view("chat");
$("tab-room").onclick = () => view("room");
$("menu").onclick = () => document.body.classList.toggle("history");
$("key").onclick = async () => await askKey() && location.reload();
$("theme").onclick = () => {
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const now = document.documentElement.dataset.theme || (dark ? "dark" : "light");
  colours(now === "dark" ? "light" : "dark");
};
addEventListener("keydown", event => {
  if (event.key === "Escape" && !document.querySelector("dialog[open]")) chat.stop();
  if (event.altKey && KEYS[event.key]) event.preventDefault(), KEYS[event.key]();
});

colours(localStorage.getItem("theme") || "");
look();
setInterval(look, 5000);
view(location.hash === "#room" ? "room" : "chat");
chat.start().catch(error => ($("messages").textContent = error.message));
