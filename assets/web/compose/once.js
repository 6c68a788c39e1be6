// What was taken of the offers for one message alone: one of a kind.

/** @import { Offer, Once, Settings } from "../shared/types.d.ts" */

/** The limits of media that an offer sets. @returns {Settings} */
const limitsOf = (/** @type {Offer | undefined} */ offer) => (offer?.kind === "media" ? offer.settings : {});

/** With one more; limits that were taken before hold on where it says nothing of them. @returns {Offer[]} */
export function withOffer(/** @type {Offer[]} */ taken, /** @type {Offer} */ offer) {
  const before = taken.find(({ kind }) => kind === offer.kind);
  const others = taken.filter((each) => each !== before);
  return [
    ...others,
    offer.kind === "media" ? { ...offer, settings: { ...limitsOf(before), ...offer.settings } } : offer,
  ];
}

/** Without those that set a limit of media, which is set otherwise now. */
export const withoutLimit = (/** @type {Offer[]} */ taken, /** @type {string} */ name) =>
  taken.filter((offer) => !(name in limitsOf(offer)));

/** Those that mean something after these messages. */
export const holdingAfter = (/** @type {Offer[]} */ taken, /** @type {{ id: string }[]} */ messages) =>
  taken.filter((offer) => offer.kind !== "shorten" || messages.some(({ id }) => id === offer.first));

/** What the program is told of them. @returns {Once} */
export function onceOf(/** @type {Offer[]} */ taken) {
  const [first = null] = taken.map((offer) => (offer.kind === "shorten" ? offer.first : null)).filter(Boolean);
  return { limits: Object.assign({}, ...taken.map(limitsOf)), first };
}
