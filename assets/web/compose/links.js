// The web addresses in a message.

const MOST_LINKS = 3;
const OPENING = { ")": "(", "]": "[", "}": "{" };

/** The first web addresses of a text, without a sentence's signs at their ends. */
export function linksOf(/** @type {string} */ text) {
  const found = (text.match(/https?:\/\/[^\s<>"`]+/g) ?? []).map(withoutSigns);
  return [...new Set(found)].filter((each) => URL.canParse(each)).slice(0, MOST_LINKS);
}

/** A closing bracket belongs to an address that has its opening one. */
function withoutSigns(/** @type {string} */ address) {
  for (;;) {
    const last = address.slice(-1);
    const opening = OPENING[/** @type {keyof typeof OPENING} */ (last)];
    const isSign = opening ? address.split(last).length > address.split(opening).length : /[.,;:!?'"]/.test(last);
    if (!isSign) return address;
    address = address.slice(0, -1);
  }
}
