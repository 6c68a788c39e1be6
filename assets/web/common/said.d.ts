// Texts and progress as the program sends them. Only for tsc.

/** A text apart from its values, or a value by itself: see preprocess/qwen35mm_preprocess/say.py. */
export type Said =
  | string
  | number
  | { text: string; values: Record<string, Said> }
  | { number: number; digits: number | null }
  | { share: number }
  | { bytes: number };

export interface Work {
  label: Said;
  share: number | null;
  /** What is known of an answer's tokens while it is written. */
  pace?: Said[];
}
