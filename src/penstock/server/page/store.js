// Conversations in the browser's own database (IndexedDB). Nothing of them is sent anywhere but in the user's own requests.

const open = new Promise((resolve, reject) => {
  const asked = indexedDB.open("penstock", 1);
  asked.onupgradeneeded = () => asked.result.createObjectStore("chats", { keyPath: "id" });
  asked.onsuccess = () => resolve(asked.result);
  asked.onerror = () => reject(asked.error);
});

async function run(mode, work) {
  const database = await open;
  return new Promise((resolve, reject) => {
    const asked = work(database.transaction("chats", mode).objectStore("chats"));
    asked.onsuccess = () => resolve(asked.result);
    asked.onerror = () => reject(asked.error);
  });
}

export const chats = {
  all: async () => (await run("readonly", store => store.getAll())).sort((a, b) => b.time - a.time),
  put: chat => run("readwrite", store => store.put(chat)),
  remove: id => run("readwrite", store => store.delete(id)),
  clear: () => run("readwrite", store => store.clear()),
};
