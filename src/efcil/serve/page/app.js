"use strict";
// The page of `efcil serve`: ask about pictures, teach a class, look after the classes.
// Text that comes from the server or from file names only ever becomes text, never markup.

const $ = (id) => document.getElementById(id);
const ROWS = 12; // classes shown before "Show all"
const PAIRS = 20; // lines in the picture of look-alikes
const BATCH = { files: 8, bytes: 24e6 }; // one request of /predict: small, so that answers come one after another
const JUNK = /^(\..*|thumbs\.db|desktop\.ini)$/i; // what file managers leave in folders

const state = {
  online: null, // not known yet
  version: null, // of the model whose classes are shown, with the start of its server
  classes: null,
  similar: [],
  confusions: null,
  sort: { key: "learned", rises: false },
  all: false, // every class, not the first rows
  job: null, // the teaching that runs; its id is null while pictures are sent
  ended: null, // id of the teaching that was followed last: word that it runs may come after its end
};

function make(tag, className = "", text = null) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== null) element.textContent = text;
  return element;
}

const quoted = (name) => `“${name}”`;
const counted = (n, one, many) => `${n.toLocaleString("en")} ${n === 1 ? one : many}`;
const pictures = (n) => counted(n, "picture", "pictures");
const classes = (n) => counted(n, "class", "classes");
const wait = (milliseconds) => new Promise((resolve) => { setTimeout(resolve, milliseconds); });
const ended = (text) => (/[.!?]$/.test(text) ? text : `${text}.`);
function bytes(files) {
  const total = files.reduce((sum, file) => sum + file.size, 0);
  return total < 1e6 ? `${Math.ceil(total / 1e3)} kB` : `${Math.round(total / 1e6)} MB`;
}

/** Percent, rounded down so that it never seems to reach a threshold that it missed. */
function percent(share) {
  return share > 0 && share < 0.01 ? "under 1\u00a0%" : `${Math.floor(share * 100 + 1e-9)}\u00a0%`;
}

const known = (value) => value !== null && value !== undefined && !Number.isNaN(value);

/** "2 of 4" for a recall in percent of so many checked pictures; "about 9 of 10" where their number is not known. */
function foundAgain({ recall, checked }) {
  if (!known(recall)) return "too few to say";
  if (checked) return `${Math.round((recall * checked) / 100)} of ${checked}`;
  const tenths = Math.round(recall / 10);
  if (Math.abs(recall - tenths * 10) < 0.05) return `${tenths} of 10`;
  if (tenths === 10) return "over 9 of 10";
  return tenths === 0 ? "under 1 of 10" : `about ${tenths} of 10`;
}

// ---- telling people -------------------------------------------------------------------------------------------------

const unsaid = { said: [], alarm: [] };

/** Have a screen reader say something, also when it is what was said last; what comes at once is said together. */
function say(text, urgent = false) {
  const region = urgent ? "alarm" : "said";
  $(region).textContent = "";
  unsaid[region].push(text);
  setTimeout(() => {
    if (unsaid[region].length) $(region).textContent = unsaid[region].splice(0).join(" ");
  }, 50);
}

let toastTimer = 0;
function toast(text, bad = false) {
  clearTimeout(toastTimer);
  $("toast").querySelector("p").textContent = text;
  $("toast").classList.toggle("bad", bad);
  $("toast").hidden = false;
  say(text, bad);
  if (!bad) toastTimer = setTimeout(() => { $("toast").hidden = true; }, 10000);
}
$("toast").querySelector("button").addEventListener("click", () => { $("toast").hidden = true; });

// ---- talking to the server ------------------------------------------------------------------------------------------

/** What the server refused, or status 0 where it did not answer. */
class Refused extends Error {
  constructor(status, body) {
    const detail = body?.detail;
    const text = Array.isArray(detail) ? detail.map((entry) => entry.msg).join("; ") : detail;
    super(status === 0 ? "The server does not answer." : text || `The server answered with error ${status}.`);
    this.status = status;
    this.body = body;
  }
}
class Stopped extends Error {} // the person said no

async function call(path, { method = "GET", body, json } = {}) {
  const headers = {};
  if (json !== undefined) headers["Content-Type"] = "application/json";
  if (method !== "GET" && token()) headers.Authorization = `Bearer ${token()}`;
  let answer;
  try {
    const content = json === undefined ? body : JSON.stringify(json);
    answer = await fetch(path, { method, headers, body: content, cache: "no-store" });
  } catch {
    throw new Refused(0);
  }
  const content = await answer.json().catch(() => null);
  if (!answer.ok) throw new Refused(answer.status, content);
  if (content === null) throw new Refused(answer.status, { detail: "The server's answer is not understood." });
  return content;
}

/** POST a form and follow how much of it has been sent. */
function upload(path, form, follow, signal) {
  return new Promise((resolve, reject) => {
    const request = new XMLHttpRequest();
    request.open("POST", path);
    if (token()) request.setRequestHeader("Authorization", `Bearer ${token()}`);
    request.responseType = "json";
    request.upload.addEventListener("progress", ({ loaded, total }) => { if (total) follow(loaded / total); });
    request.addEventListener("load", () => {
      if (request.status >= 200 && request.status < 300 && request.response) resolve(request.response);
      else reject(new Refused(request.status, request.response));
    });
    request.addEventListener("error", () => reject(new Refused(0)));
    request.addEventListener("abort", () => reject(new Stopped()));
    signal.addEventListener("abort", () => request.abort());
    request.send(form);
  });
}

// ---- dialogs and the token ------------------------------------------------------------------------------------------

/** Show a dialog; true when it was accepted. Escape and the first button mean no. */
function answered(dialog) {
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "ok"), { once: true });
  });
}
for (const button of document.querySelectorAll("dialog [data-close]")) {
  button.addEventListener("click", () => button.closest("dialog").close(""));
}

function confirmed(title, text, yes, no) {
  $("ask-dialog-title").textContent = title;
  $("ask-dialog-text").textContent = text;
  $("ask-dialog").querySelector("[type=submit]").textContent = yes;
  $("ask-dialog").querySelector("[data-close]").textContent = no;
  return answered($("ask-dialog"));
}

const token = () => sessionStorage.getItem("token") ?? "";
function keepToken(value) {
  if (value) sessionStorage.setItem("token", value);
  else sessionStorage.removeItem("token");
  $("token-open").textContent = value ? "Change token" : "Enter token";
}
const WHY = $("token-why").textContent;

async function askToken(why, bad = false) {
  $("token-why").textContent = why;
  $("token-why").classList.toggle("error", bad);
  $("token").value = "";
  if (!(await answered($("token-dialog")))) return false;
  keepToken($("token").value.trim());
  $("token").value = "";
  return true;
}
$("token-open").addEventListener("click", async () => {
  if (await askToken(WHY)) toast(token() ? "The token is kept until you close this tab." : "The token is removed.");
});

/** Do what needs the token; ask for it, and again, as long as the server wants another one. */
async function allowed(action) {
  for (;;) {
    try {
      return await action();
    } catch (error) {
      if (error.status !== 401) throw error;
      const wrong = token() !== "";
      keepToken("");
      const why = wrong ? "The server does not accept that token. Try again." : WHY;
      if (!(await askToken(why, wrong))) throw new Stopped();
    }
  }
}

// ---- the state of the server ----------------------------------------------------------------------------------------

let healthTimer = 0;
let retryLater = []; // cards that wait for the server

async function checkHealth() {
  clearTimeout(healthTimer);
  try {
    const health = await call("health");
    const back = state.online !== true;
    setOnline(true);
    const version = `${health.started} ${health.model.version}`; // a server counts from 1 when it is started again
    if ((back || version !== state.version) && (await loadClasses())) state.version = version;
    showModel(health.model);
    if (health.job && !state.job && health.job !== state.ended) follow(health.job);
    if (back && retryLater.length) ask(retryLater.splice(0));
  } catch (error) {
    if (error.status === undefined) throw error;
    setOnline(false);
  }
  healthTimer = setTimeout(checkHealth, state.online ? 5000 : 2000);
}

function showModel(model) {
  $("model").textContent = model.name;
  $("model").title = `${model.method} on ${model.backbone}, ${model.size} pixels`;
  $("model").hidden = false;
}

function setOnline(online) {
  if (online === false && state.online !== false) say($("offline").querySelector("p").textContent, true);
  if (online && state.online === false) say("The server answers again.");
  state.online = online;
  $("offline").hidden = online;
  showStatus();
}

function showStatus() {
  const number = state.classes?.length ?? 0;
  const [name, text] =
    state.online === false ? ["down", "The server does not answer"]
    : !state.classes ? ["waiting", "Connecting…"]
    : state.job && !state.job.id ? ["busy", "Sending pictures"]
    : state.job ? ["busy", "Learning. Questions are answered as before."]
    : ["ready", number ? `Ready, knows ${classes(number)}` : "Ready, knows no class yet"];
  if ($("status").textContent !== text) $("status").textContent = text;
  $("status").dataset.state = name;
  $("undo").disabled = !state.online || Boolean(state.job) || !number;
}
$("offline-retry").addEventListener("click", checkHealth);
document.addEventListener("visibilitychange", () => { if (!document.hidden) checkHealth(); });

/** Something failed: a lost server has its own message, everything else is said here. */
function report(error, prefix = "") {
  if (error instanceof Stopped) return;
  if (error.status === 0) checkHealth();
  else toast(ended(prefix + error.message), true);
  if (error.status === undefined) throw error; // a mistake of this page
}

// ---- pictures that come in: chosen, dropped, pasted -----------------------------------------------------------------

/** Read the files of a drop, those in folders too; `folders` maps the folders that had files in them to these. */
async function dropped(transfer) {
  const entries = [...transfer.items].filter((item) => item.kind === "file").map((item) => item.webkitGetAsEntry?.());
  const plain = [...transfer.files];
  if (!entries.some((entry) => entry?.isDirectory)) return { files: plain, folders: new Map() };
  const files = [];
  const folders = new Map();
  const walk = async (entry, parent) => {
    if (entry.isFile) {
      if (parent && JUNK.test(entry.name)) return;
      const file = await new Promise((resolve, reject) => { entry.file(resolve, reject); });
      files.push(file);
      if (parent) folders.set(parent, [...(folders.get(parent) ?? []), file]);
      return;
    }
    const reader = entry.createReader();
    for (;;) { // a reader gives a hundred entries at a time, and none when it is done
      const some = await new Promise((resolve, reject) => { reader.readEntries(resolve, reject); });
      if (!some.length) return;
      for (const one of some) await walk(one, entry.name);
    }
  };
  for (const entry of entries) if (entry) await walk(entry, "");
  return { files, folders };
}

function picker(button, input, take) {
  button.addEventListener("click", () => input.click());
  input.addEventListener("change", () => {
    const files = [...input.files];
    input.value = ""; // so that the same file can be chosen again
    if (files.length) take(files, new Map());
  });
}
picker($("ask-drop"), $("ask-files"), askAbout);
picker($("teach-drop"), $("teach-files"), addToPool);
picker($("ask-photo"), $("ask-camera"), askAbout);
picker($("teach-photo"), $("teach-camera"), addToPool);

// A file dropped beside the zones must not replace the page: the whole teaching card teaches, the rest asks.
const zone = (event) => ($("teach").contains(event.target) ? "teach" : "ask");
const holdsFiles = (event) => event.dataTransfer?.types.includes("Files");
function mark(name) {
  for (const one of ["ask", "teach"]) $(`${one}-drop`).classList.toggle("over", one === name);
}
addEventListener("dragover", (event) => {
  if (!holdsFiles(event)) return;
  event.preventDefault();
  event.dataTransfer.dropEffect = "copy";
  mark(zone(event));
});
addEventListener("dragleave", (event) => { if (!event.relatedTarget) mark(null); });
addEventListener("drop", async (event) => {
  if (!holdsFiles(event)) return;
  event.preventDefault();
  mark(null);
  const take = zone(event) === "teach" ? addToPool : askAbout;
  try {
    const { files, folders } = await dropped(event.dataTransfer);
    if (files.length) take(files, folders);
    else toast("There was no picture in what you dropped.", true);
  } catch {
    toast("What you dropped cannot be read.", true);
  }
});

let pasted = 0;
addEventListener("paste", (event) => {
  const files = [...(event.clipboardData?.files ?? [])];
  if (!files.length) return;
  event.preventDefault();
  const named = files.map((file) => { // browsers call every pasted picture image.png
    const kind = /^image\.(\w+)$/.exec(file.name)?.[1];
    return kind ? new File([file], `pasted ${++pasted}.${kind}`, { type: file.type }) : file;
  });
  ($("teach").contains(document.activeElement) ? addToPool : askAbout)(named, new Map());
});

/** A small picture of a file; `blank` marks the box where the browser cannot show it (HEIC, not a picture). */
function preview(file, box) {
  const image = make("img");
  image.alt = "";
  image.decoding = "async";
  image.addEventListener("error", () => box.classList.add("blank"));
  image.src = URL.createObjectURL(file);
  box.append(image);
  return () => URL.revokeObjectURL(image.src);
}

// ---- asking ---------------------------------------------------------------------------------------------------------

const cards = []; // {file, item, answer, drop}
let asking = Promise.resolve();

function askAbout(files) {
  const fresh = files.map((file) => {
    const item = make("li", "answer waiting");
    const thumb = make("div", "thumb");
    const drop = preview(file, thumb);
    const what = make("div", "what");
    what.append(make("p", "file", file.name), make("p", "label"), make("div", "sure"), make("p", "others"));
    what.querySelector(".file").title = file.name;
    const use = make("button", "quiet teach-it", "Teach with it");
    use.type = "button";
    use.setAttribute("aria-label", `Teach with ${file.name}`);
    use.addEventListener("click", () => {
      addToPool([file], new Map());
      $("name").focus();
    });
    what.append(use);
    item.append(thumb, what);
    return { file, item, drop, answer: null };
  });
  cards.unshift(...fresh);
  $("answers").prepend(...fresh.map((card) => card.item));
  fresh.forEach(showCard);
  showAskNote();
  ask(fresh);
}

/** Ask about pictures, some at a time, after those that were there before. */
function ask(wanted) {
  asking = asking.then(async () => {
    let left = wanted.filter((card) => cards.includes(card));
    const total = left.length;
    while (left.length) {
      let weight = 0;
      const fits = (card) => (weight += card.file.size) <= BATCH.bytes;
      const some = left.slice(0, BATCH.files).filter((card, index) => fits(card) || index === 0);
      await askSome(some);
      left = left.filter((card) => !some.includes(card) && cards.includes(card));
    }
    if (total) say(spoken(wanted));
  });
}

async function askSome(some, again = 5) {
  const form = new FormData();
  for (const { file } of some) form.append("files", file, file.name);
  let predictions;
  try {
    predictions = (await call("predict?top=3", { method: "POST", body: form })).predictions;
  } catch (error) {
    if (error.status === undefined) throw error;
    if (Array.isArray(error.body?.predictions)) predictions = error.body.predictions; // none of them was readable
    else if (error.status === 0) {
      retryLater.push(...some);
      some.forEach(showCard);
      checkHealth();
      return;
    } else if (error.status === 503 && again) { // busy: it says so, and means soon
      await wait(1000);
      await askSome(some, again - 1);
      return;
    } else if (error.status === 413 && some.length > 1) { // too large together
      for (const one of some) await askSome([one]);
      return;
    } else {
      const large = `This picture is too large for the server (${bytes([some[0].file])}).`;
      const why = error.status === 413 ? large : error.message;
      predictions = some.map(() => ({ error: why }));
    }
  }
  some.forEach((card, index) => {
    card.answer = predictions[index] ?? { error: "The server gave no answer for this picture." };
    showCard(card);
  });
  showAskNote();
}

const threshold = () => Number($("threshold").value) / 100;
// Share of pictures of known classes that may be called unlike all classes: --reject-strange of the command line.
const TYPICAL = 0.05;
const isUnlike = (answer) => typeof answer.typicality === "number" && answer.typicality < TYPICAL;
const isNone = (answer) => answer.label === null || isUnlike(answer) || answer.confidence < threshold();

function showCard(card) {
  const { item, answer } = card;
  const part = (name) => item.querySelector(name);
  const failed = answer?.error !== undefined;
  item.className = `answer${!answer ? " waiting" : failed ? " bad" : isNone(answer) ? " none" : ""}`;
  part(".teach-it").hidden = failed;
  part(".sure").hidden = failed;
  if (!answer) {
    part(".label").textContent = retryLater.includes(card) ? "Waiting for the server" : "Looking…";
    return;
  }
  if (failed) {
    part(".label").textContent = "No answer";
    part(".others").textContent = answer.error;
    return;
  }
  const none = isNone(answer);
  const best = answer.top?.[0] ?? answer;
  part(".label").textContent = none ? "None of these" : answer.label;
  const track = make("div", "track");
  const fill = make("i");
  fill.style.width = `${100 * best.confidence}%`;
  track.append(fill);
  part(".sure").replaceChildren(track, make("b", "", percent(best.confidence)));
  const others = (answer.top ?? []).slice(none ? 0 : 1).filter((one) => one.confidence >= 0.01);
  const listed = others.map((one) => `${one.label} ${percent(one.confidence)}`).join(", ");
  const why = isUnlike(answer) ? "Unlike the pictures of all classes. " : "";
  part(".others").textContent = why + (listed && `${none ? "Nearest" : "Or"}: ${listed}`);
}

function tally(some) {
  const done = some.filter((card) => card.answer);
  const failed = done.filter((card) => card.answer.error !== undefined);
  const none = done.filter((card) => card.answer.error === undefined && isNone(card.answer));
  const parts = [pictures(some.length)];
  if (done.length < some.length) parts.push(`${some.length - done.length} waiting`);
  if (none.length) parts.push(`${none.length} none of these`);
  if (failed.length) parts.push(`${failed.length} without an answer`);
  return parts.join(", ");
}

function spoken(some) {
  if (some.length > 1) return `Answered: ${tally(some)}.`;
  const { file, answer } = some[0];
  if (!answer) return `${file.name} waits for the server.`;
  if (answer.error !== undefined) return `${file.name}: ${answer.error}`;
  return `${file.name}: ${isNone(answer) ? "none of these" : `${answer.label}, ${percent(answer.confidence)}`}`;
}

function showAskNote() {
  const untaught = state.classes?.length === 0;
  $("ask-note").textContent =
    cards.length ? tally(cards)
    : untaught ? "Nothing is taught yet. Teach a first class, then ask."
    : "The answers appear here.";
  $("ask-clear").hidden = cards.length === 0;
}

$("threshold").addEventListener("input", () => {
  $("threshold-value").textContent = `${$("threshold").value} %`;
  $("threshold").setAttribute("aria-valuetext", `${$("threshold").value} %`);
  cards.forEach(showCard);
  showAskNote();
});
$("ask-clear").addEventListener("click", () => {
  for (const { drop } of cards) drop();
  cards.length = 0;
  retryLater = [];
  $("answers").replaceChildren();
  showAskNote();
  $("ask-drop").focus();
});

// ---- teaching -------------------------------------------------------------------------------------------------------

let pool = []; // {file, item, drop}
let batch = new Map(); // name of a class to its files: taught together with the pool
const isZip = (file) => /\.zip$/i.test(file.name);
const archive = () => pool.find(({ file }) => isZip(file))?.file;
const sameFile = (a, b) => a.name === b.name && a.size === b.size && a.lastModified === b.lastModified;

/** Keep the room of pictures that are learned until the next click, so that nothing jumps under the hand. */
function keepRoom(keep) {
  $("pool").style.minHeight = keep ? `${$("pool").offsetHeight}px` : "";
  $("pool").classList.toggle("kept", keep);
}

function addToPool(files, folders) {
  keepRoom(false);
  teachError("");
  if (folders.size > 1) { // each folder is a class, taught together
    for (const [name, own] of folders) addToBatch(name, own);
    say(`${classes(folders.size)} to learn: ${[...folders.keys()].join(", ")}.`);
    return;
  }
  const zips = files.filter(isZip);
  if (zips.length && (zips.length + pool.length + batch.size > 1 || files.length > 1)) {
    teachError("A zip goes alone. Remove the other pictures first.");
    return;
  }
  if (archive()) takeOut(pool);
  const [folder] = folders.keys();
  if (folder && !$("name").value) $("name").value = folder;
  const again = files.filter((file) => pool.some((one) => sameFile(one.file, file))).length;
  for (const file of files) {
    if (pool.some((one) => sameFile(one.file, file))) continue;
    const item = make("li", isZip(file) ? "zip" : "");
    const button = make("button");
    button.type = "button";
    button.title = button.ariaLabel = `Remove ${file.name}`;
    const drop = isZip(file) ? () => {} : preview(file, button);
    if (isZip(file)) button.append(`${file.name} (${bytes([file])})`);
    const entry = { file, item, drop };
    button.addEventListener("click", () => {
      const next = item.nextElementSibling ?? item.previousElementSibling;
      takeOut([entry]);
      (next?.querySelector("button") ?? $("teach-drop")).focus();
    });
    item.append(button);
    pool.push(entry);
    $("pool").append(item);
  }
  showPool();
  say(`${pictures(pool.length)} to learn from${again ? `, ${again} of them there already` : ""}.`);
}

/** Put a class aside, to be taught with others. */
function addToBatch(name, files) {
  const before = batch.get(name) ?? [];
  batch.set(name, [...before, ...files.filter((file) => !before.some((one) => sameFile(one, file)))]);
  showBatch();
}

function showBatch() {
  $("batch").replaceChildren(...[...batch].map(([name, files]) => {
    const item = make("li");
    const remove = make("button", "quiet", "Remove");
    remove.type = "button";
    remove.ariaLabel = `Remove ${name}`;
    remove.addEventListener("click", () => {
      batch.delete(name);
      showBatch();
      $("teach-drop").focus();
    });
    item.append(make("span", "", `${name}: ${pictures(files.length)}`), remove);
    return item;
  }));
  showPool();
  showTeachButton();
}

$("teach-next").addEventListener("click", () => {
  const name = $("name").value.trim();
  if (!name) return teachError("Give the class a name.", "name");
  addToBatch(name, pool.map(({ file }) => file));
  $("name").value = "";
  takeOut(pool);
  $("name").focus();
  say(`${quoted(name)} is put aside. Give the next class a name.`);
});

function takeOut(entries) {
  for (const { drop, item } of entries) {
    drop();
    item.remove();
  }
  pool = pool.filter((one) => !entries.includes(one));
  showPool();
}

function showPool() {
  const zip = archive();
  $("teach-clear").hidden = pool.length === 0;
  $("teach-next").hidden = pool.length === 0 || Boolean(zip);
  $("teach-hint").textContent =
    zip ? "Each folder in the zip is learned as a class with its name."
    : !pool.length ? (batch.size ? "Add one more class, or teach these." : "A few dozen different pictures work best.")
    : pool.length < 5 ? `${pictures(pool.length)}. More would be better: a few dozen work best.`
    : `${pictures(pool.length)}. ${pool.length < 20 ? "Good. More make it surer." : "That is plenty."}`;
  $("name").disabled = Boolean(zip);
  showName();
}

const NAME_HINT = $("name-hint").textContent;
function showName() {
  const name = $("name").value.trim();
  const same = state.classes?.find((one) => one.name === name);
  const close = state.classes?.find((one) => one.name.toLowerCase() === name.toLowerCase());
  $("name-hint").textContent =
    archive() ? "The names come from the folders in the zip."
    : same ? `${quoted(name)} is known from ${pictures(same.images)}. These are added to it.`
    : close ? `There is a class ${quoted(close.name)}. Write it the same way to add to it.`
    : name ? `${quoted(name)} will be a new class.`
    : NAME_HINT;
}
$("name").addEventListener("input", () => { teachError(""); showName(); });
$("teach-clear").addEventListener("click", () => {
  takeOut(pool);
  $("teach-drop").focus();
});

function teachError(text, field = null) {
  $("teach-error").textContent = text;
  $("teach-error").hidden = !text;
  $("name").toggleAttribute("aria-invalid", false);
  if (field === "name") $("name").setAttribute("aria-invalid", "true");
  if (text) say(text, true);
  if (field) $(field).focus();
}

$("teach-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  const name = $("name").value.trim();
  const zip = archive();
  if (state.job) return teachError("Something is being learned. Wait for its end, or stop it.");
  if (!zip && !name && (pool.length || !batch.size)) return teachError("Give the class a name.", "name");
  if (!pool.length && (name || !batch.size)) return teachError("Add pictures to learn from.", "teach-drop");
  teachError("");
  const together = new Map(batch);
  if (together.size && pool.length) together.set(name, [...(together.get(name) ?? []), ...pool.map(({ file }) => file)]);
  const form = new FormData();
  if (zip) form.append("archive", zip, zip.name);
  else if (together.size) {
    try {
      form.append("archive", await zipped(together), "classes.zip");
    } catch {
      return teachError("A picture can no longer be read: it was moved or changed. Add it again.");
    }
  } else {
    form.append("label", name);
    for (const { file } of pool) form.append("files", file, file.name);
  }
  const sent = [...pool];
  const stop = new AbortController();
  const what = together.size === 1 ? quoted([...together.keys()][0]) : classes(together.size);
  const title = `Learning ${zip ? zip.name : together.size ? what : quoted(name)}`;
  state.job = { id: null, stop, name, sent };
  showJob("running", title, "Sending the pictures", 0);
  const number = together.size ? [...together.values()].flat().length : sent.length;
  say(`${title}. Sending ${counted(number, zip ? "file" : "picture", zip ? "files" : "pictures")}.`);
  try {
    const follower = (share) => {
      const note = share < 1 ? `Sending the pictures: ${percent(share)}` : "Sent. Waiting for the server.";
      showJob("running", title, note, 0);
    };
    const answer = await allowed(() => upload("teach", form, follower, stop.signal));
    await follow(answer.job, { name, sent, together: [...together.keys()], refused: answer.refused ?? [] });
  } catch (error) {
    state.job = null;
    $("job").hidden = true;
    showStatus();
    showTeachButton();
    if (error instanceof Stopped) return say("Nothing was taught.");
    if (error.status === undefined) throw error;
    const size = bytes(together.size ? [...together.values()].flat() : sent.map((one) => one.file));
    if (error.status === 0) {
      // A server that stops reading a large upload looks like one that is gone.
      const alive = await call("health").then(() => true, () => false);
      teachError(alive ? `The server did not take the pictures (${size}). They may be too large together: try fewer.`
        : "The pictures were not sent: the server does not answer. They are still here; try again later.");
      checkHealth();
    } else if (error.status === 413) {
      teachError(`Too much at once (${size}): ${ended(error.message)} Remove some pictures, or use smaller ones.`);
    }
    else teachError(`Not taught: ${ended(error.message)}`);
  }
});

function showTeachButton() {
  $("teach-go").setAttribute("aria-disabled", String(Boolean(state.job)));
  $("teach-go").textContent = state.job ? "Teaching…" : batch.size ? "Teach all" : "Teach";
}

function showJob(status, title, note, progress) {
  $("job").hidden = false;
  $("job").dataset.state = status;
  $("job-title").firstChild.textContent = title;
  $("job-note").textContent = note;
  $("job-note").title = "";
  const running = status === "running" || status === "queued";
  $("job-bar").value = 100 * progress;
  $("job-bar").hidden = status === "failed" || status === "cancelled";
  $("job-cancel").hidden = !running;
  $("job-close").hidden = running;
  showTeachButton();
  showStatus();
}

/** Where a teaching stands, in plain words; `first` is the share that was seen first, and when. */
function stage(share, first) {
  if (share < 0.05) return "looking through the pictures";
  if (share >= 0.95) return "almost done";
  const seconds = (Date.now() - first.time) / 1000;
  const left = (seconds * (1 - share)) / (share - first.share);
  if (seconds < 3 || !Number.isFinite(left)) return "practising";
  const minutes = counted(Math.round(left / 60), "minute", "minutes");
  return `practising, ${left < 60 ? "less than a minute" : `about ${minutes}`} left`;
}

const CRCS = Uint32Array.from({ length: 256 }, (_, value) => {
  for (let bit = 0; bit < 8; bit++) value = value & 1 ? (value >>> 1) ^ 0xedb88320 : value >>> 1;
  return value;
});

/** A zip, not compressed, with a folder for each class. */
async function zipped(together) {
  const parts = [];
  const entries = [];
  let place = 0;
  const record = (fields) => { // numbers as [value, bytes], the lowest byte first
    const bytes = new Uint8Array(fields.reduce((sum, [, width]) => sum + width, 0));
    const view = new DataView(bytes.buffer);
    let at = 0;
    for (const [value, width] of fields) {
      if (width === 4) view.setUint32(at, value, true);
      else view.setUint16(at, value, true);
      at += width;
    }
    return bytes;
  };
  for (const [label, files] of together) {
    for (const [number, file] of files.entries()) {
      const content = new Uint8Array(await file.arrayBuffer());
      let crc = 0xffffffff;
      for (const byte of content) crc = CRCS[(crc ^ byte) & 255] ^ (crc >>> 8);
      const folder = label.replace(/[/\\]/g, "_");
      const name = new TextEncoder().encode(`classes/${folder}/${number}-${file.name.replace(/[/\\]/g, "_")}`);
      const about = [[20, 2], [0x800, 2], [0, 2], [0, 2], [33, 2], [(crc ^ 0xffffffff) >>> 0, 4]];
      const sizes = [[content.length, 4], [content.length, 4], [name.length, 2], [0, 2]];
      const rest = [[0, 2], [0, 2], [0, 2], [0, 4], [place, 4]];
      parts.push(record([[0x04034b50, 4], ...about, ...sizes]), name, content);
      entries.push(record([[0x02014b50, 4], [20, 2], ...about, ...sizes, ...rest]), name);
      place += 30 + name.length + content.length;
    }
  }
  const length = entries.reduce((sum, part) => sum + part.length, 0);
  const count = entries.length / 2;
  const end = record([[0x06054b50, 4], [0, 2], [0, 2], [count, 2], [count, 2], [length, 4], [place, 4], [0, 2]]);
  return new Blob([...parts, ...entries, end], { type: "application/zip" });
}

/** Follow a job to its end; `mine` says what this page sent for it. */
async function follow(id, mine = null) {
  state.job = { ...state.job, id };
  let said = 0;
  let first = null;
  let job;
  for (;;) {
    try {
      job = await call(`jobs/${encodeURIComponent(id)}`);
    } catch (error) {
      if (error.status === undefined) throw error;
      if (error.status === 404) {
        job = { status: "failed", message: "The server was started again and does not know this teaching any more." };
      } else { // keep following: the job goes on without us
        setOnline(false);
        await wait(2000);
        continue;
      }
    }
    if (state.online === false) checkHealth();
    if (!["queued", "running"].includes(job.status)) break;
    const { what } = lesson(job, mine);
    const share = job.progress ?? 0;
    first ??= { share, time: Date.now() };
    showJob(job.status, `Learning ${what}`, `${percent(share)}, ${stage(share, first)}`, share);
    $("job-note").title = job.message ?? ""; // the server's own words, for those who know them
    if (Math.floor(share * 4) > said) {
      said = Math.floor(share * 4);
      say(`Learning ${what}: ${percent(share)}`);
    }
    await wait(600);
  }
  state.job = null;
  state.ended = id;
  await finish(job, mine);
}

/** The classes of a job, and what to call them. */
function lesson(job, mine) {
  const names = job.classes?.length ? job.classes : mine?.name ? [mine.name] : [];
  return { names, what: names.length === 1 ? quoted(names[0]) : names.length ? classes(names.length) : "New pictures" };
}

/** The files that the server left out, by name, with the reason of the first. */
function leftOut(mine) {
  const refused = mine?.refused ?? [];
  if (!refused.length) return "";
  const names = refused.slice(0, 3).map((one) => one.file ?? "a file").join(", ");
  const more = refused.length > 3 ? ` and ${refused.length - 3} more` : "";
  return ` Left out: ${names}${more} (${refused[0].error}).`;
}

async function finish(job, mine) {
  const { names, what } = lesson(job, mine);
  const hadFocus = document.activeElement === $("job-cancel");
  if (job.status === "done") {
    await loadClasses();
    const learned = names.length === 1 ? state.classes?.find((one) => one.name === names[0]) : null;
    const checked =
      !learned ? "Ask about pictures now."
      : known(learned.recall) ? `Found again: ${foundAgain(learned)}.`
      : "There were too few pictures to check it. Ask about some now.";
    const note = checked + leftOut(mine);
    showJob("done", `${what} ${names.length === 1 ? "is" : "are"} learned`, note, 1);
    if (mine) {
      keepRoom(true);
      for (const own of mine.together) batch.delete(own);
      takeOut(mine.sent); // what was added meanwhile stays
      showBatch();
      if ($("name").value.trim() === mine.name) $("name").value = "";
      showName();
    }
    say(`${what} learned. ${note}`);
  } else if (job.status === "cancelled") {
    showJob("cancelled", "Stopped", "Nothing has changed.", 0);
    say("Teaching stopped. Nothing has changed.");
  } else {
    const why = ended(job.message || "The server gave no reason.");
    showJob("failed", `${what} could not be learned`, `${why} The classes are as they were before.`, 0);
    say(`${what} could not be learned. ${job.message ?? ""}`, true);
  }
  if (hadFocus) $("job-close").focus();
}

$("job-cancel").addEventListener("click", async () => {
  const { id, stop } = state.job ?? {};
  if (!id) return stop?.abort();
  try {
    await allowed(() => call(`jobs/${encodeURIComponent(id)}/cancel`, { method: "POST" }));
    if (state.job) $("job-note").textContent = "Stopping…";
  } catch (error) {
    report(error, "Not stopped: ");
  }
});
$("job-close").addEventListener("click", () => {
  keepRoom(false);
  $("job").hidden = true;
  $("teach-drop").focus();
});

// ---- the classes ----------------------------------------------------------------------------------------------------

let loading = 0;

/** Show the classes as they are now; whether they could be read. */
async function loadClasses() {
  const turn = ++loading;
  const answer = await call("classes").catch((error) => { report(error, "The classes could not be read: "); });
  if (!answer || turn !== loading) return false; // what was asked for later is newer
  state.classes = answer.classes;
  state.similar = answer.similar ?? [];
  state.confusions = answer.confusions;
  $("classes").classList.remove("loading");
  showClasses();
  $("mixed").hidden = false;
  drawMixed();
  drawAlike();
  showAskNote();
  showName();
  showStatus();
  return true;
}

const byName = (a, b) => a.name.localeCompare(b.name, undefined, { numeric: true, sensitivity: "base" });
function sorted(list) {
  const { key, rises } = state.sort;
  const value = (one) => (key === "learned" ? Date.parse(one.learned) : one[key]);
  const told = (one) => key === "name" || known(value(one));
  const order = (a, b) => {
    if (key === "name") return byName(a, b);
    const taught = key === "learned" ? list.indexOf(a) - list.indexOf(b) : 0; // on one day: in the server's order
    return value(a) - value(b) || taught;
  };
  const rows = list.filter(told).sort((a, b) => (rises ? order(a, b) : -order(a, b)) || byName(a, b));
  return [...rows, ...list.filter((one) => !told(one)).sort(byName)]; // what is not known comes last
}

function when(date) {
  const time = make("time");
  const parsed = new Date(date);
  time.dateTime = date ?? "";
  const day = { day: "numeric", month: "short", year: "numeric", timeZone: "UTC" }; // the day that the server wrote
  time.textContent = known(parsed.getTime()) ? parsed.toLocaleDateString("en-GB", day) : "unknown";
  return time;
}

function cell(tag, className, ...content) {
  const made = make(tag, className);
  made.setAttribute("role", tag === "th" ? "rowheader" : "cell");
  if (tag === "th") made.scope = "row";
  made.append(...content);
  return made;
}

function showClasses() {
  const total = state.classes.length;
  const wanted = $("filter").value.trim().toLowerCase();
  const matching = sorted(state.classes).filter((one) => one.name.toLowerCase().includes(wanted));
  const shown = state.all || wanted ? matching : matching.slice(0, ROWS);
  const images = state.classes.reduce((sum, one) => sum + one.images, 0);
  $("classes-note").textContent =
    !total ? "No class yet. The first one in three steps:"
    : wanted && !matching.length ? `No class has ${quoted($("filter").value.trim())} in its name.`
    : `${classes(total)}, learned from ${pictures(images)}${wanted ? `; ${matching.length} shown` : ""}`;
  $("table").hidden = !shown.length;
  $("steps").hidden = total > 0;
  $("recall-hint").hidden = !total;
  $("filter-label").hidden = total <= ROWS && !wanted;
  $("more").hidden = Boolean(wanted) || total <= ROWS;
  $("more").textContent = state.all ? `Show the first ${ROWS}` : `Show all ${total}`;
  $("more").setAttribute("aria-expanded", String(state.all));
  for (const head of $("table").tHead.rows[0].cells) {
    const way = state.sort.rises ? "ascending" : "descending";
    if (head.dataset.key === state.sort.key) head.setAttribute("aria-sort", way);
    else head.removeAttribute("aria-sort");
  }
  const focused = document.activeElement?.dataset?.forget;
  $("table").tBodies[0].replaceChildren(...shown.map(row));
  if (focused !== undefined) forgetButton(focused)?.focus();
}

function forgetButton(name) {
  return [...document.querySelectorAll("[data-forget]")].find((button) => button.dataset.forget === name);
}

function row(one) {
  const line = make("tr");
  line.setAttribute("role", "row");
  const found = make("div", known(one.recall) ? "found" : "found unknown");
  if (known(one.recall)) {
    const track = make("div", "track");
    const fill = make("i");
    fill.style.width = `${one.recall}%`;
    track.append(fill);
    found.append(track);
  }
  found.append(make("span", "unit", "found again: "), make("span", "", foundAgain(one)));
  const forget = make("button", "quiet", "Forget");
  forget.type = "button";
  forget.dataset.forget = one.name;
  forget.setAttribute("aria-label", `Forget ${one.name}`);
  forget.addEventListener("click", () => forgetClass(one, line));
  const images = make("span", "unit", one.images === 1 ? " picture" : " pictures");
  line.append(
    cell("th", "", one.name),
    cell("td", "n", one.images.toLocaleString("en"), images),
    cell("td", "when", when(one.learned)),
    cell("td", "", found),
    cell("td", "last", forget),
  );
  return line;
}

async function forgetClass(one, line) {
  const text =
    `It was learned from ${pictures(one.images)}. This cannot be undone, and neither can the last teaching any more.`;
  if (!(await confirmed(`Forget ${quoted(one.name)}?`, text, "Forget it", "Keep it"))) return;
  const next = (line.nextElementSibling ?? line.previousElementSibling)?.querySelector("button");
  try {
    await allowed(() => call("forget", { method: "POST", json: { classes: [one.name] } }));
    const name = next?.dataset.forget;
    await loadClasses();
    toast(`${quoted(one.name)} is forgotten.`);
    (forgetButton(name) ?? $("classes")).focus();
  } catch (error) {
    report(error, `${quoted(one.name)} was not forgotten: `);
  }
}

$("undo").addEventListener("click", async () => {
  const text = "The classes go back to what they were before it.";
  if (!(await confirmed("Undo the last teaching?", text, "Undo it", "Leave as it is"))) return;
  try {
    await allowed(() => call("undo", { method: "POST" }));
    await loadClasses();
    toast("The last teaching is undone.");
  } catch (error) {
    report(error, "Not undone: ");
  }
});

for (const head of $("table").querySelectorAll("th[data-key]")) {
  head.querySelector("button").addEventListener("click", () => {
    const { key } = head.dataset;
    const same = state.sort.key === key;
    state.sort = { key, rises: same ? !state.sort.rises : key === "name" };
    showClasses();
    say(`Sorted by ${head.textContent.trim().toLowerCase()}, ${state.sort.rises ? "rising" : "falling"}.`);
  });
}
$("filter").addEventListener("input", showClasses);
$("more").addEventListener("click", () => {
  state.all = !state.all;
  showClasses();
});

// ---- which classes are mixed up -------------------------------------------------------------------------------------

const UNKNOWN = {
  "few classes": "Teach at least two classes to see which ones are mixed up.",
  "few images": "Too few pictures to estimate this. It takes at least ten of each of two classes.",
  "not estimated": "This model has no estimate of it.",
};

/** Percent of a confusion, rounded: nothing under 1, and 100 only if it is. */
function rounded(share) {
  return share < 0.01 ? "" : String(share < 1 ? Math.min(99, Math.round(100 * share)) : 100);
}

/** The estimated confusions: a table of as many classes as fit, and the pairs as a list. */
function drawMixed() {
  const { classes: names, percent: shares, estimated, unknown } = state.confusions;
  const pairs = names.flatMap((name, row) => names.map((other, column) => [name, other, shares[row][column] / 100]));
  const wrong = pairs.filter(([name, other, share]) => name !== other && share >= 0.01).sort((a, b) => b[2] - a[2]);
  const said = ([name, other, share]) => `${rounded(share) || "under 1"}\u00a0% of ${name} as ${other}`;
  $("mixed-list").replaceChildren(...wrong.slice(0, PAIRS).map((pair) => make("li", "", said(pair))));
  $("mixed-details").hidden = !wrong.length;
  if (unknown) {
    $("mixed-note").textContent = UNKNOWN[unknown];
    return $("mixed-picture").replaceChildren();
  }
  const width = $("mixed-picture").clientWidth;
  const pen = make("canvas").getContext("2d");
  pen.font = getComputedStyle($("mixed-picture")).font;
  const widest = Math.max(...names.map((name) => pen.measureText(name).width));
  const first = Math.ceil(Math.min(180, width * 0.32, widest + 12)); // for the names of the rows
  const fitting = Math.max(2, Math.floor((width - first) / 30));
  const shown = names.slice(0, fitting).sort((a, b) => byName({ name: a }, { name: b }));
  const few = state.classes.length - estimated;
  $("mixed-note").textContent = [
    "Estimated from the learned pictures, not counted on new ones:",
    "of 100 pictures of a row’s class, how many would get the name of the column. Empty: under 1.",
    shown.length < estimated ? `Shown are the ${shown.length} of ${classes(estimated)} that are mixed up most.` : "",
    few ? `${classes(few)} of fewer than ten pictures ${few === 1 ? "is" : "are"} left out.` : "",
  ].filter(Boolean).join(" ");
  const table = make("table");
  table.setAttribute("aria-labelledby", "mixed-title");
  table.setAttribute("aria-describedby", "mixed-note");
  const side = Math.min(56, (width - first) / shown.length);
  table.style.width = `${first + side * shown.length}px`;
  const label = make("col");
  label.style.width = `${first}px`;
  table.append(label);
  const above = table.createTHead().insertRow();
  above.append(make("td"), ...shown.map((name) => mixedHead("col", name)));
  const body = table.createTBody();
  for (const name of shown) {
    const line = body.insertRow();
    line.append(mixedHead("row", name), ...shown.map((other) => {
      const share = shares[names.indexOf(name)][names.indexOf(other)] / 100;
      const box = make("td", name === other ? "right" : "wrong", rounded(share));
      box.title = said([name, other, share]);
      // Few errors must be seen, and 40 % of a color leave the number on it readable.
      const strength = name === other ? 30 * share : share < 0.01 ? 0 : 10 + 30 * Math.min(1, share / 0.25);
      box.style.setProperty("--strength", `${strength}%`);
      return box;
    }));
  }
  $("mixed-picture").replaceChildren(table);
}

function mixedHead(scope, name) {
  const head = make("th");
  head.scope = scope;
  head.title = name;
  head.append(make("span", "", name));
  return head;
}

// ---- which classes look alike ---------------------------------------------------------------------------------------

/** Groups of linked names, the closest pairs beside each other: chains joined at their nearer ends. */
function seriated(pairs) {
  const chain = new Map();
  for (const [a, b] of pairs) {
    const left = chain.get(a) ?? [a];
    const right = chain.get(b) ?? [b];
    if (left === right) continue;
    if (left.indexOf(a) < (left.length - 1) / 2) left.reverse();
    if (right.indexOf(b) > (right.length - 1) / 2) right.reverse();
    const joined = [...left, ...right];
    for (const name of joined) chain.set(name, joined);
  }
  return [...new Set(chain.values())];
}

const SVG = "http://www.w3.org/2000/svg";
function draw(tag, attributes, text = null) {
  const element = document.createElementNS(SVG, tag);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== null) element.textContent = text;
  return element;
}

/** Shorten a text element until it fits. */
function fit(element, name, width) {
  element.textContent = name;
  let length = name.length;
  while (length > 1 && element.getComputedTextLength() > width) {
    length -= Math.max(1, Math.floor(length / 12));
    element.textContent = `${name.slice(0, length).trimEnd()}…`;
  }
}

function drawAlike() {
  const total = state.classes?.length ?? 0;
  const limit = Math.min(PAIRS, Math.max(3, Math.round(total * 1.2)));
  const pairs = [...state.similar].sort((a, b) => b[2] - a[2]).slice(0, limit);
  const groups = seriated(pairs);
  const names = groups.flat();
  const some = names.length < total ? ` Of ${total} classes, the ${names.length} in the closest pairs are shown.` : "";
  $("alike-note").textContent =
    total < 2 ? "Teach at least two classes to see which ones look alike."
    : !pairs.length ? "No two classes look alike."
    : `A thicker line means more alike, and more easily mixed up.${some}`;
  $("alike-details").hidden = !pairs.length;
  $("alike-list").replaceChildren(...pairs.map(([a, b, share]) => {
    const item = make("li", "", `${a} and ${b}`);
    item.append(make("span", "", ` ${percent(Math.max(0, share))} alike`));
    return item;
  }));
  if (!pairs.length) return $("alike-picture").replaceChildren();

  const width = Math.max(240, $("alike-picture").clientWidth);
  const svg = draw("svg", { role: "img", width });
  const nearest = pairs.slice(0, 3).map(([a, b]) => `${a} and ${b}`).join("; ");
  svg.setAttribute("aria-label", `Lines between classes that look alike. The closest: ${nearest}.`);
  $("alike-picture").replaceChildren(svg);

  const labels = new Map(names.map((name) => [name, draw("text", { "text-anchor": "end" })]));
  svg.append(...labels.values());
  let x = 0; // where the names end
  for (const [name, label] of labels) {
    fit(label, name, Math.min(width * 0.55, 300));
    x = Math.max(x, Math.ceil(label.getComputedTextLength()));
  }

  // Each group is a block of names under each other with its lines to their right; blocks fill columns.
  const step = names.length <= 6 ? 46 : names.length <= 14 ? 34 : 26;
  const place = new Map(groups.flatMap((group) => group.map((name, index) => [name, index * step + step / 2])));
  const spans = pairs.map(([a, b]) => Math.abs(place.get(a) - place.get(b)));
  const numbers = pairs.length <= 6; // more of them would lie over each other
  const room = numbers ? 62 : 22;
  const widest = (width - x - room - 8) / Math.max(...spans);
  let stretch = Math.min(0.8, widest);
  const block = x + stretch * Math.max(...spans) + room;
  const most = Math.min(groups.length, Math.floor((width + 12) / (block + 12)));
  const columns = Array(Math.max(1, most)).fill(4); // how far down each is filled
  if (columns.length === 1) stretch = Math.min(1.4, widest); // lines may use the room that no second column needs
  const blocks = new Map();
  for (const group of groups) {
    const column = columns.indexOf(Math.min(...columns));
    const left = Math.round((column * width) / columns.length);
    const holder = draw("g", { transform: `translate(${left} ${columns[column]})` });
    for (const name of group) blocks.set(name, holder);
    svg.append(holder);
    columns[column] += group.length * step + 12;
  }
  const height = Math.max(...columns);
  svg.setAttribute("height", height);
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);

  const [low, high] = [pairs[pairs.length - 1][2], pairs[0][2]];
  const lines = pairs.map(([a, b, share], index) => {
    const strength = high > low ? (share - low) / (high - low) : 1;
    const depth = stretch * spans[index];
    const [top, bottom] = [place.get(a), place.get(b)].sort((one, other) => one - other);
    const path = draw("path", {
      d: `M${x + 14} ${top}A${depth} ${(bottom - top) / 2} 0 0 1 ${x + 14} ${bottom}`,
      "stroke-width": 1.5 + 6 * strength,
      "stroke-opacity": 0.6 + 0.4 * strength,
    });
    const number = percent(Math.max(0, share));
    path.append(draw("title", {}, `${a} and ${b}: ${number} alike`));
    const parts = [path];
    if (numbers) parts.push(draw("text", { class: "pct", x: x + 20 + depth, y: (top + bottom) / 2 + 4 }, number));
    blocks.get(a).append(path);
    return { a, b, parts };
  });
  for (const { a, parts } of lines) blocks.get(a).append(...parts.slice(1)); // numbers lie over all lines
  const nodes = new Map();
  for (const [name, label] of labels) {
    const node = draw("g", { class: "node" });
    label.setAttribute("x", x);
    label.setAttribute("y", place.get(name) + 5);
    const area = draw("rect", { x: 0, y: place.get(name) - step / 2, width: x + 20, height: step }); // to point at
    node.append(area, label, draw("circle", { cx: x + 13, cy: place.get(name), r: 4.5 }), draw("title", {}, name));
    blocks.get(name).append(node);
    nodes.set(name, node);
    node.addEventListener("pointerenter", () => pick(name));
    node.addEventListener("pointerleave", () => pick(null));
  }
  function pick(name) {
    svg.classList.toggle("picked", name !== null);
    for (const node of nodes.values()) node.classList.remove("on");
    nodes.get(name)?.classList.add("on");
    for (const { a, b, parts } of lines) {
      const on = a === name || b === name;
      for (const part of parts) part.classList.toggle("on", on);
      if (on) for (const end of [a, b]) nodes.get(end).classList.add("on");
    }
  }
}

for (const [id, again] of [["alike-picture", drawAlike], ["mixed-picture", drawMixed]]) {
  let drawn = 0;
  new ResizeObserver(([entry]) => {
    const width = Math.round(entry.contentRect.width);
    if (width === drawn || !width) return;
    drawn = width;
    if (state.classes) again();
  }).observe($(id));
}

keepToken(token());
showStatus();
showPool();
checkHealth();
