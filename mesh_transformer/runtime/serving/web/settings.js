// The fields of a request that both modes have, and their values in this browser.

import { at } from "./dom.js";
import { keep, kept } from "./kept.js";
import { server } from "./server.js";

const INTEGERS = ["max_tokens", "top_k", "seed"];
const controls = at("controls"), most = controls.elements.max_tokens;
// max tokens of each mode; an answer may fill the context
const LIMITS = { chat: "", completions: most.defaultValue };
let limits = { ...LIMITS }, mode = "completions";

const fields = () => [...controls.querySelectorAll("input, textarea")].filter(field => field !== most);

function save() {
  limits[mode] = most.value;
  keep("settings", { limits, fields: Object.fromEntries(fields().map(field => [field.name, field.value])) });
}

export function restore() {
  const values = kept("settings");
  limits = { ...LIMITS, ...values?.limits };
  for (const field of fields()) field.value = values?.fields?.[field.name] ?? field.defaultValue;
  most.value = limits[mode];
}

export function setMode(name) {
  limits[mode] = most.value;
  mode = name;
  most.value = limits[mode];
  most.placeholder = mode === "chat" ? "no limit" : "";
}

function setDefaults() {
  for (const field of at("sampling").querySelectorAll("input, textarea")) field.value = field.defaultValue;
  most.value = LIMITS[mode];
  save();
}

export const systemMessage = () => controls.elements.system.value;

// The fields of a request for completions or a chat.
export function body() {
  const request = { model: server.model, stream: true, stream_options: { include_usage: true, continuous_usage_stats: true } };
  for (const input of controls.querySelectorAll("input[type=number]")) {
    if (input.value === "") continue;
    if (!input.checkValidity()) { input.focus(); throw new Error(input.name + ": " + input.validationMessage); }
    request[input.name] = INTEGERS.includes(input.name) ? parseInt(input.value, 10) : parseFloat(input.value);
  }
  const stops = controls.elements.stop.value.split("\n").filter(line => line);
  if (stops.length) request.stop = stops;
  return request;
}

controls.addEventListener("input", save);
at("defaults").addEventListener("click", setDefaults);
