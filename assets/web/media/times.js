// Times of a video: as they are written here, and as a person writes them.

import { number } from "../common/words.js";

/** A time in a video, such as "1:02:03.4"; without tenths where there are none to tell. */
export function timeOf(/** @type {number} */ seconds, digits = 1) {
  const tenths = Math.round(seconds * 10 ** digits);
  const rest = (tenths / 10 ** digits) % 60;
  const minutes = Math.floor(tenths / 10 ** digits / 60);
  const written = number(rest, digits).padStart(digits ? digits + 3 : 2, "0");
  const [hours, left] = [Math.floor(minutes / 60), minutes % 60];
  return hours ? `${hours}:${String(left).padStart(2, "0")}:${written}` : `${left}:${written}`;
}

/** A range of a video, such as "1:02–1:05.5". */
export function rangeOf(/** @type {number} */ from_s, /** @type {number | null} */ to_s) {
  const digits = [from_s, to_s ?? 0].every(Number.isInteger) ? 0 : 1;
  return `${timeOf(from_s, digits)}–${to_s === null ? "" : timeOf(to_s, digits)}`;
}

// What happens between two frames so far apart can be missed.
export const COARSE_S = 2;
const ASKS_WHEN =
  /(?<!\p{L})(?:when|what time|wann|quand|quel moment|cuándo|qué momento)(?!\p{L})|什么时候|何时|哪一刻/iu;

/**
 * Whether a question about a video is asked once more about the times that its answer names: as the person chose, or
 * where it asks for a time.
 * @param {{ step_s?: number | null, twice?: boolean }} file
 * @param {string} text
 */
export const asksTwice = ({ step_s, twice }, text) => (step_s ?? 0) > COARSE_S && (twice ?? ASKS_WHEN.test(text));

/** The seconds that a person wrote, as "83.5", "1:23,5" or "1:02:03"; null for anything else. */
export function secondsOf(/** @type {string} */ text) {
  const found = /^\s*(?:(?:(\d+):)?(\d{1,2}):)?(\d+(?:[.,]\d*)?)\s*s?\s*$/.exec(text);
  if (!found) return null;
  const [, hours = "0", minutes = "0", seconds] = found;
  return Number(hours) * 3600 + Number(minutes) * 60 + Number(seconds.replace(",", "."));
}

/**
 * A time in a text, or a range of times.
 * @typedef {object} Found
 * @property {number} start of what says it in the text
 * @property {number} stop
 * @property {number} from_s
 * @property {number | null} to_s
 */

// As English, German, French, Spanish and Chinese write them, and "<12.5 seconds>", as the model is given them.
const NUMBER = String.raw`\d+(?:[.,]\d+)?`;
const WORDS = "seconds?|secs?|sekunden?|sek\\.?|secondes?|segundos?|segs?\\.?|s";
const UNIT = `(?:(?:${WORDS})(?![\\p{L}\\p{N}_/])|秒钟?)`;
const MINUTES = "(?:minutes?|mins?\\.?|minuten?|minutos?|m|分钟?)";
const LINK = "(?:\\s*(?:and|und|et|y|e)\\s+|\\s*,?\\s*|零)";
const OF_DAY = String.raw`\s*(?:[ap]\.?m\b|uhr\b|o'clock|heures?\b)`;
const CLOCK = String.raw`(?:\d{1,2}:)?\d{1,2}:\d{2}(?:[.,]\d{1,3})?(?!\d|[:.,]\d|${OF_DAY})`;
// 1'20"
const PRIMES = String.raw`\d+\s?['′’]\s?\d{1,2}\s?(?:["″”]|'')`;
const COUNTED = `(?:(?<=(?:at|from|to|until|around)\\s+)second|sekunde|seconde|segundo)\\s+${NUMBER}(?![\\p{L}\\d:])`;
const MARK = `${NUMBER}-seconds?(?=\\s+(?:mark|point))`;
const LONG = `\\d+\\s*${MINUTES}${LINK}${NUMBER}\\s*${UNIT}`;
const TIME = `(?:${[LONG, PRIMES, CLOCK, MARK, `${NUMBER}\\s*${UNIT}`, COUNTED].join("|")})`;
const TO = String.raw`\s*(?:[-–—−~～→]|至|到|(?:to|till|until|bis|à|a|al|hasta|jusqu'à)(?!\p{L}))\s*`;
// Two times, unless a word before them says that they are the ends of one range.
const AND = String.raw`\s*(?:(?:and|und|et|y)(?!\p{L})|和|与)\s*`;
const BEFORE = String.raw`(?<![\p{Script=Latin}\p{N}:.,/_$€£-])`;
const BETWEEN = String.raw`(?:between|zwischen|entre|在|介于)\s*(?:les\s+|los\s+)?`;
const TIMES = new RegExp(
  `${BEFORE}<?(?:(?<=${BETWEEN}<?)(?<a>${TIME}|${NUMBER})>?${AND}<?(?<b>${TIME})>?` +
    `|(?<from>${TIME}|${NUMBER})>?${TO}<?(?<to>${TIME})>?|(?<one>${TIME})>?)`,
  "dgiu",
);
const ABOUT = "(?:about|around|roughly|only|just|etwa|ca\\.?|rund|nur|environ|unos|casi|约|大约|只|为)?";
const LASTS = [
  "for|lasts?|lasting|takes?|every|dauert|alle|während|pendant|dure",
  "durant|dura|durante|cada|持续了?|每|长达|时长",
].join("|");
const IS_LENGTH = new RegExp(`(?:(?<!\\p{L})|(?=\\p{Script=Han}))(?:${LASTS})\\s*${ABOUT}\\s*$`, "iu");
const IS_LONG =
  /^\s*(?:long|lang|apart|later|earlier|später|früher|de long|de largo|plus tard|más tarde|长)(?!\p{L})/iu;

/** The times and ranges in a text; lengths, such as "for 3 seconds", and times of day are none. @returns {Found[]} */
export function findTimes(/** @type {string} */ text) {
  if (!/\d/.test(text)) return [];
  return [...text.matchAll(TIMES)].flatMap((match) => timesOf(text, match));
}

/** The range of a match, or each of its times where it is none. @returns {Found[]} */
function timesOf(/** @type {string} */ text, /** @type {RegExpExecArray} */ match) {
  const places = match.indices?.groups ?? {};
  const [first, last] = [places.a ?? places.from ?? places.one, places.b ?? places.to];
  const [start, stop] = [match.index, match.index + match[0].length];
  const before = text.slice(Math.max(start - 40, 0), start);
  const isLength = IS_LENGTH.test(before) || IS_LONG.test(text.slice(stop, stop + 40));
  if (isLength && !match[0].startsWith("<")) return [];
  const [from_s, to_s] = [first, last].map((place) => (place ? toSeconds(text.slice(...place)) : null));
  const isBare = /^[\d.,]+$/.test(text.slice(...first));
  // "3 to 01:10" says nothing of what the first number counts.
  const isRange = last && !(isBare && text.slice(...last).includes(":"));
  if (isRange && from_s !== null && to_s !== null && to_s > from_s) return [{ start, stop, from_s, to_s }];
  if (!last) return from_s === null ? [] : [{ start, stop, from_s, to_s: null }];
  const alone = (/** @type {[number, number]} */ [start, stop], /** @type {number | null} */ seconds) =>
    seconds === null ? [] : [{ start, stop, from_s: seconds, to_s: null }];
  return [...(isBare ? [] : alone(first, from_s)), ...alone(last, to_s)];
}

function toSeconds(/** @type {string} */ written) {
  const parts = written.match(/\d+(?:[.,]\d+)?/g) ?? [];
  // "1,200" is a thousand and two hundred, "1,2" and "1,25" are parts of a second.
  const values = parts.map((part) => Number(/^\d+,\d{3}$/.test(part) ? part.replace(",", "") : part.replace(",", ".")));
  if (parts.length > 1 && values.slice(1).some((value) => value >= 60)) return null;
  return values.reduce((sum, value) => sum * 60 + value, 0);
}

/**
 * Which video is meant at a place in a text: the one that its sentence names, by its file's name or its number, else
 * the one that was named last before, else the last one.
 * @param {string} text
 * @param {number} at
 * @param {string[]} names of the videos, in their order
 */
export function meantAt(text, at, names) {
  if (names.length < 2) return names.length - 1;
  const named = mentions(text, names);
  const before = named.filter(({ start }) => start < at);
  const end = at + (/[.!?](?=\s|$)|[。！？\n]/u.exec(text.slice(at))?.index ?? text.length);
  const ends = [...text.slice(0, at).matchAll(/[.!?](?=\s)|[。！？\n]/gu)];
  const begin = ends.at(-1)?.index ?? -1;
  const inSentence = before.findLast(({ start }) => start > begin);
  const after = named.find(({ start }) => start >= at && start < end);
  return (inSentence ?? after ?? before.at(-1))?.video ?? names.length - 1;
}

// By their places; the last one is "last".
const ORDINALS = [
  ["first", "erste[nrsm]?", "premi(?:er|ère)", "primer[oa]?", "第一"],
  ["second", "zweite[nrsm]?", "deuxième|second[e]?", "segund[oa]", "第二"],
  ["third", "dritte[nrsm]?", "troisième", "tercer[oa]?", "第三"],
  ["fourth", "vierte[nrsm]?", "quatrième", "cuart[oa]", "第四"],
].map((words) => words.join("|"));
const VIDEO = "(?:videos?|vidéos?|clips?|vídeos?|films?|个?视频|段?视频|个?短片)";

function mentions(/** @type {string} */ text, /** @type {string[]} */ names) {
  /** @type {{ start: number, video: number }[]} */
  const found = [];
  names.forEach((name, video) => {
    const patterns = [`${VIDEO}\\s*(?:no\\.?|nr\\.?|#|n°)?\\s*${video + 1}(?!\\d)`];
    if (ORDINALS[video]) patterns.push(`(?:${ORDINALS[video]})\\s*${VIDEO}`);
    for (const each of new Set([name, name.replace(/\.\w+$/, "")]))
      if (each.length > 2)
        patterns.push(`(?<![\\p{L}\\p{N}])${each.replace(/[.*+?^${}()|[\]\\]/g, "\\$&")}(?![\\p{L}\\p{N}])`);
    for (const { index } of text.matchAll(new RegExp(patterns.join("|"), "giu"))) found.push({ start: index, video });
  });
  return found.sort((a, b) => a.start - b.start);
}
