// As much of a browser as the timeline's page asks for, to run its own script without one. Nothing is laid out: every
// canvas is 1126 pixels wide and stands in the top left corner, and text is not measured.
"use strict";
const WIDTH = 1126;
const frames = [], made = [], asked = [];

class Node_ {
  constructor(tag) {
    Object.assign(this, { tag, children: [], listeners: {}, style: {}, attributes: {}, hidden: false, title: "" });
    this.classList = { add() {}, remove() {} };
    made.push(this);
  }
  get clientWidth() { return WIDTH; }
  get offsetWidth() { return 200; }
  get offsetHeight() { return 100; }
  get textContent() { return this.children.map((one) => typeof one === "string" ? one : one.textContent).join(""); }
  set textContent(text) { this.children = [String(text)]; }
  append(...some) { this.children.push(...some); }
  replaceChildren(...some) { this.children = some; }
  insertRow() { const row = new Node_("tr"); this.append(row); return row; }
  insertCell() { const cell = new Node_("td"); this.append(cell); return cell; }
  get rows() { return this.children.filter((one) => one.tag === "tr"); }
  get cells() { return this.children; }
  setAttribute(name, value) { this.attributes[name] = value; }
  setPointerCapture() {}
  getBoundingClientRect() { return { left: 0, top: 0, width: WIDTH, height: 0 }; }
  getContext() { return new Proxy({}, { get: (kept, name) => name in kept ? kept[name] : () => undefined }); }
  addEventListener(name, listener) { (this.listeners[name] = this.listeners[name] || []).push(listener); }
  dispatchEvent(event) { (this.listeners[event.type] || []).forEach((listener) => listener(event)); }
  querySelectorAll(tag) { return this.children.flatMap((one) => one.tag === tag ? [one] : one.tag ? one.querySelectorAll(tag) : []); }
  querySelector(tag) { return this.querySelectorAll(tag)[0] || null; }
  click() { this.dispatchEvent({ type: "click" }); }
}

class PointerEvent {
  constructor(type, options) { Object.assign(this, { type, offsetX: options.clientX, offsetY: options.clientY, deltaX: 0 }, options); }
  preventDefault() {}
}
const WheelEvent = PointerEvent;

const byId = new Map(["data", "steps", "about", "legend", "axis", "views", "tip"].map((id) => [id, new Node_(id)]));
const heading = new Node_("h1");
const document = {
  title: PAGE_TITLE,
  documentElement: new Node_("html"),
  getElementById: (id) => byId.get(id),
  createElement: (tag) => new Node_(tag),
  querySelector: (tag) => tag === "h1" ? heading : null,
  addEventListener() {},
};
const window = { devicePixelRatio: 1 };
const innerWidth = 1200, innerHeight = 800;
const getComputedStyle = () => ({ getPropertyValue: () => " #123456" });
const requestAnimationFrame = (callback) => frames.push(callback);
const addEventListener = () => undefined, matchMedia = () => ({ addEventListener() {} }), scrollBy = () => undefined;
const performance = { getEntriesByType: () => asked };
byId.get("data").textContent = PAGE_DATA;

/** What a browser does when it is idle. */
function runFrames() { while (frames.length) frames.shift()(); }
