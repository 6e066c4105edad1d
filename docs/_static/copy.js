// A button on each block of code that copies what one would type: no prompts, no output, of a diff the new lines.
function typed(block) {
    const lines = block.innerText.replace(/\n$/, "").split("\n");
    const language = block.closest("[class*='highlight-']").className;
    if (language.includes("highlight-console")) {
        return lines.filter((line) => line.startsWith("$ ")).map((line) => line.slice(2)).join("\n");
    }
    if (language.includes("highlight-diff")) {
        return lines.filter((line) => !line.startsWith("-")).map((line) => line.replace(/^[+ ] ?/, "")).join("\n");
    }
    return lines.join("\n");
}

document.addEventListener("DOMContentLoaded", () => {
    for (const block of document.querySelectorAll("div.highlight pre")) {
        const button = document.createElement("button");
        button.className = "copy";
        button.type = "button";
        button.textContent = "Copy";
        button.addEventListener("click", async () => {
            await navigator.clipboard.writeText(typed(block));
            button.textContent = "Copied";
            setTimeout(() => (button.textContent = "Copy"), 1500);
        });
        block.parentElement.appendChild(button);
    }
});
