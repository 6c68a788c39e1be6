// What draws the state (state.js), and asks the person. Only for tsc.

import type { Chat, ModelChange, News, Offer } from "../shared/types.d.ts";

export interface View {
  /** What is written for a conversation, or a new one, goes along to another. */
  moved(from: string | null, to: string | null): void;
  /** Draws a conversation; `isOther` than the one before. */
  showChat(chat: Chat, isOther: boolean): void;
  /** Draws what is new of an answer in the conversation. */
  showAnswer(answer: News): void;
  /** Goes to the end of the conversation. */
  toEnd(): void;
  /** Goes to a message of it. */
  toMessage(id: string): void;
  /** Tells a screen reader. */
  speak(words: string): void;
  /** Says that something doesn't fit, and what would. */
  offer(words: string, offers: Offer[]): void;
  /** The person has changed a conversation here: other tabs look at it. */
  changed(id: string | null): void;
  /** There is another conversation, or another order of them. */
  listChanged(): void;
  settingsChanged(): void;
  changeModel(change: ModelChange): Promise<unknown>;
  /** Until the program can be reached. */
  whenThere(): Promise<void>;
}
