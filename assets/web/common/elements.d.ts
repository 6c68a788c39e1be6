// The words of `h` in dom.js. Only for tsc.

export type Child = Element | string | null | undefined | false | Child[];

type TagOf<Selector extends string> = Selector extends `${infer Tag}.${string}` ? Tag : Selector;
export type ElementOf<Selector extends string> =
  TagOf<Selector> extends keyof HTMLElementTagNameMap ? HTMLElementTagNameMap[TagOf<Selector>] : HTMLElement;

export type Attributes<E> = {
  [K in keyof HTMLElementEventMap as `on${K}`]?: (event: HTMLElementEventMap[K] & { currentTarget: E }) => unknown;
} & { [name: string]: unknown };
