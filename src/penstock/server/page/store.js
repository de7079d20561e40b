// Conversations in the browser's own database (IndexedDB). Nothing of them is sent anywhere but in the user's own requests.

const answered = asked => new Promise((resolve, reject) => {
  asked.onsuccess = () => resolve(asked.result);
  asked.onerror = () => reject(asked.error);
});

const opening = indexedDB.open("penstock", 1);
opening.onupgradeneeded = () => opening.result.createObjectStore("chats", { keyPath: "id" });
const open = answered(opening);

const run = async (mode, work) => answered(work((await open).transaction("chats", mode).objectStore("chats")));

export const chats = {
  all: async () => (await run("readonly", store => store.getAll())).sort((a, b) => b.time - a.time),
  put: chat => run("readwrite", store => store.put(chat)),
  remove: id => run("readwrite", store => store.delete(id)),
  clear: () => run("readwrite", store => store.clear()),
};
