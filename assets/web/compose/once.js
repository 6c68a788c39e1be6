// The offers that were taken for one message only: at most one of each kind.

/** @import { Offer, Once, Settings } from "../common/types.d.ts" */

/** The limits of media that an offer sets. @returns {Settings} */
const limitsOf = (/** @type {Offer | undefined} */ offer) => (offer?.kind === "media" ? offer.settings : {});

/** Adds an offer; limits that were taken before stay unless it sets them. @returns {Offer[]} */
export function withOffer(/** @type {Offer[]} */ taken, /** @type {Offer} */ offer) {
  const before = taken.find(({ kind }) => kind === offer.kind);
  const others = taken.filter((each) => each !== before);
  return [
    ...others,
    offer.kind === "media" ? { ...offer, settings: { ...limitsOf(before), ...offer.settings } } : offer,
  ];
}

/** Drops the offers that set this media limit, which is now set otherwise. */
export const withoutLimit = (/** @type {Offer[]} */ taken, /** @type {string} */ name) =>
  taken.filter((offer) => !(name in limitsOf(offer)));

/** The offers that still apply after these messages. */
export const holdingAfter = (/** @type {Offer[]} */ taken, /** @type {{ id: string }[]} */ messages) =>
  taken.filter((offer) => offer.kind !== "shorten" || messages.some(({ id }) => id === offer.first));

/** What the program is told of them. @returns {Once} */
export function onceOf(/** @type {Offer[]} */ taken) {
  const [first = null] = taken.map((offer) => (offer.kind === "shorten" ? offer.first : null)).filter(Boolean);
  return { limits: Object.assign({}, ...taken.map(limitsOf)), first };
}
