/** The page follows what is written at its end, unless the reader has scrolled up. */

import { byId } from "./words.js";

const NEAR_PIXELS = 80;

export class Follower {
  constructor() {
    this.isFollowing = true;
    addEventListener("scroll", () => this.#look(), { passive: true });
    addEventListener("resize", () => this.grown());
    byId("newest").addEventListener("click", () => this.toEnd());
  }

  /** There is more at the end. */
  grown() {
    if (this.isFollowing) this.#jump();
    byId("newest").hidden = this.isFollowing;
  }

  /** Go to the end, and follow from now on. */
  toEnd() {
    this.isFollowing = true;
    this.grown();
  }

  #jump() {
    scrollTo({ top: document.documentElement.scrollHeight, behavior: "instant" });
  }

  #look() {
    const root = document.documentElement;
    this.isFollowing = root.scrollHeight - innerHeight - scrollY < NEAR_PIXELS;
    if (this.isFollowing) byId("newest").hidden = true;
  }
}
