"use strict";
// Fetches the page again every two seconds, and changes only what differs: focus, scroll position, selection
// and what is unfolded stay. Without scripts, it is a plain page.

const EVERY = 2000;
let failedSince = null;

async function refresh() {
  const main = document.querySelector("main");
  const begun = performance.now();
  // Not under a finger that is about to press something.
  if (!document.hidden && main.hasAttribute("data-live") && !document.querySelector("main :active")) {
    try {
      const answer = await fetch(location.href, {
        headers: { "X-Part": "main" }, cache: "no-store", signal: AbortSignal.timeout(20000),
      });
      const text = await answer.text();
      const next = new DOMParser().parseFromString(text, "text/html").querySelector("main");
      if (answer.status === 503) tell(next.querySelector(".why").textContent.slice(0, 400));
      else if (!next) tell("The dashboard does not answer.");
      else {
        const focused = document.activeElement;
        change(main, next);
        // A node that is moved loses it.
        if (focused.isConnected) focused.focus({ preventScroll: true });
        tell(null);
      }
    } catch (error) {
      tell("The dashboard does not answer.");
    }
  }
  // An expensive page is requested less often.
  setTimeout(refresh, Math.max(EVERY, 10 * (performance.now() - begun)));
}

function tell(trouble) {
  failedSince = trouble && (failedSince || new Date());
  const text = trouble ? `No news since ${failedSince.toISOString().slice(11, 19)} UTC; trying again. ${trouble}` : "";
  const notice = document.getElementById("notice");
  if (notice.textContent !== text) notice.textContent = text;
  document.body.classList.toggle("stale", Boolean(trouble));
}

// Not node.id: in a form, a field of that name hides it.
const key = (node) => (node.nodeType === Node.ELEMENT_NODE && node.getAttribute("id")) || "";

function change(old, next) {
  if (old.nodeName !== next.nodeName) return old.replaceWith(next);
  if (old.nodeType !== Node.ELEMENT_NODE) {
    if (old.nodeValue !== next.nodeValue) old.nodeValue = next.nodeValue;
    return;
  }
  for (const { name } of [...old.attributes]) {
    if (!next.hasAttribute(name) && name !== "open") old.removeAttribute(name);
  }
  for (const { name, value } of next.attributes) {
    // What its reader has folded stays folded.
    if (name !== "open" && old.getAttribute(name) !== value) old.setAttribute(name, value);
  }
  changeChildren(old, next);
}

// An element with an id is identified by it, so that a row stays the row of the same job.
function changeChildren(old, next) {
  const wanted = [...next.childNodes];
  const wantedKeys = new Set(wanted.map(key));
  for (const node of [...old.childNodes]) if (!wantedKeys.has(key(node))) node.remove();
  const byKey = new Map([...old.children].filter(key).map((node) => [key(node), node]));
  let at = old.firstChild;
  for (const node of wanted) {
    const isAlike = at && !key(at) && at.nodeName === node.nodeName;
    const here = key(node) ? byKey.get(key(node)) : isAlike ? at : null;
    if (!here) {
      old.insertBefore(node, at);
      continue;
    }
    if (here === at) at = at.nextSibling;
    else old.insertBefore(here, at);
    change(here, node);
  }
  while (at) {
    const rest = at;
    at = at.nextSibling;
    rest.remove();
  }
}

// So that a screen reader says what was done, and Tab goes on from there.
document.getElementById("said")?.focus();

// One box ticks all others of its form.
for (const all of document.querySelectorAll("[data-all]")) {
  all.closest("[hidden]").hidden = false;
  all.addEventListener("change", () => {
    for (const box of all.form.querySelectorAll("[name=id]")) box.checked = all.checked;
  });
}

setTimeout(refresh, EVERY);
