// Uses /dashboard like a person would, in Chromium: `node dashboard.mjs BASE_URL KEY CHROMIUM PICTURE`.
import assert from "node:assert/strict";
import { chromium } from "playwright-core";

const [base, key, executablePath, picture] = process.argv.slice(2);
const browser = await chromium.launch({ executablePath, args: ["--no-sandbox", "--disable-gpu"] });
const page = await browser.newPage({ viewport: { width: 1200, height: 1000 } });
const problems = [];
const foreign = [];
page.on("pageerror", (error) => problems.push(String(error)));
page.on("console", (message) => {
  if (message.type() === "error" && !message.text().includes("401")) problems.push(message.text());
});
page.on("request", (request) => {
  if (!request.url().startsWith(base) && !request.url().startsWith("data:")) foreign.push(request.url());
});
try {
  await page.goto(`${base}/dashboard`);

  // Without a key: asked for one, with the keyboard alone.
  await page.getByLabel("API key").waitFor();
  await page.getByLabel("API key").focus();
  await page.keyboard.type(key);
  await page.keyboard.press("Enter");
  await page.getByText("ready", { exact: true }).waitFor();
  assert.equal(await page.locator("#model").textContent(), "fake");

  // A prompt with the keyboard: the answer streams, accepted drafts are marked, the result is announced.
  await page.getByLabel("Kind").selectOption("text");
  await page.getByLabel("Prompt").fill("abcdefghijklmnopqrstuvwxyz".repeat(4));
  await page.getByLabel("Prompt").press("Control+Enter");
  await page.locator("#answer mark.accepted").first().waitFor();
  await page.getByText(/^done: 105 tokens, 70 of 70 drafts accepted$/).waitFor();
  assert.equal(await page.locator("#answer").textContent(), "zyxwvutsrqponmlkjihgfedcba".repeat(4));
  const marked = (await page.locator("#answer mark.accepted").allTextContents()).join("");
  assert.ok(marked.length >= 60 && marked.length <= 72, `marked ${marked.length}`);

  // Chat goes through the template.
  await page.getByLabel("Kind").selectOption("chat");
  await page.getByLabel("Prompt").fill("hi");
  await page.getByRole("button", { name: "Send" }).click();
  await page.getByText(/^done: 21 tokens/).waitFor();
  assert.equal(await page.locator("#answer").textContent(), [..."<user>hi\n<assistant>"].reverse().join(""));

  // While a long request runs, it is a row of the table; Escape stops it.
  await page.getByLabel("Kind").selectOption("text");
  await page.getByLabel("Prompt").fill("x".repeat(2000));
  await page.getByLabel("Tokens", { exact: true }).fill("1900");
  await page.getByRole("button", { name: "Send" }).click();
  const row = page.locator("#requests tr").first();
  await row.waitFor();
  assert.match(await row.innerText(), /gen-[0-9a-f]+\s+verify/);
  await page.waitForFunction(() => document.querySelectorAll("#requests .cell.verify").length > 3);
  await page.waitForFunction(() => Number(document.querySelector("#throughput").textContent) > 0);
  await page.waitForFunction(() => /now \d/.test(document.querySelector("#chart-throughput").getAttribute("aria-label")));
  if (picture) await page.screenshot({ path: picture, fullPage: true });
  await page.keyboard.press("Escape");
  await page.getByText(/^stopped after \d+ tokens$/).waitFor();
  await page.getByText("No requests.").waitFor();

  // Errors are told in words.
  await page.getByLabel("Tokens", { exact: true }).fill("4096");
  await page.getByRole("button", { name: "Send" }).click();
  await page.getByText(/^failed: This model's maximum context length/).waitFor();

  // For screen readers: everything has a name, and the tab order reaches every control.
  const unnamed = await page.evaluate(() => [...document.querySelectorAll("input, select, textarea, button, svg, [role]")]
    .filter((e) => !e.labels?.length && !e.getAttribute("aria-label") && !e.getAttribute("aria-labelledby")
      && !e.textContent.trim() && e.getAttribute("role") !== "status").map((e) => e.outerHTML));
  assert.deepEqual(unnamed, []);
  await page.locator("#prompt").focus();
  const order = ["prompt"];
  for (let i = 0; i < 5; i++) {
    await page.keyboard.press("Tab");
    order.push(await page.evaluate(() => document.activeElement.id));
  }
  assert.deepEqual(order, ["prompt", "kind", "max-tokens", "temperature", "send", "answer"]);

  // Narrow windows do not scroll sideways.
  await page.setViewportSize({ width: 360, height: 700 });
  assert.ok(await page.evaluate(() => document.documentElement.scrollWidth <= 360));

  assert.deepEqual(foreign, []);
  assert.deepEqual(problems.filter((text) => !text.includes("400")), []);
  console.log("ok");
} finally {
  await browser.close();
}
