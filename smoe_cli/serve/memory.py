"""Between the log of conversations and the engine: what was held is written down, and computed again after a start."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator

from smoe_cli.chat.model import ChatModel
from smoe_cli.engine.manager import EngineManager
from smoe_cli.engine.protocol import Generate, Sampling
from smoe_cli.errors import SmoeError
from smoe_cli.serve.sessions import Session, Sessions
from smoe_cli.serve.state import ConversationLog, vault_digest

log = logging.getLogger("smoe")


class Memory:
    """Called from worker threads, but for ``stop``."""

    def __init__(self, conversations: ConversationLog) -> None:
        self._log = conversations
        self._digests: dict[int, str] = {}
        self._told = False
        self._stopped = False
        self._lock = threading.Lock()

    def keep(self, session: Session, model: ChatModel) -> None:
        """Write down what the session holds. A disk that does not take it costs the memory, not the reply."""
        with self._lock:
            self._keep(session, model)

    def _keep(self, session: Session, model: ChatModel) -> None:
        try:
            self._log.append(session.name, self._digest(model), session.ids)
        except SmoeError as error:
            if not self._told:
                log.warning("%s; conversations are not kept meanwhile", error.text)
            self._told = True
        else:
            self._told = False

    def stop(self) -> None:
        """Somebody waits: what has not been computed again by now is computed when it is asked for."""
        self._stopped = True

    def recompute(self, engine: EngineManager, sessions: Sessions, model: ChatModel) -> Iterator[Session]:
        """The sessions as they were, the one spoken to last first; each is yielded when it is there."""
        for conversation in self._log.conversations(self._digest(model)):
            session = sessions.named(conversation.session)
            if session is None or session.ids:
                continue
            if self._stopped:
                return
            session.ids = list(conversation.ids)
            greedy = Sampling(temperature=0.0)
            for _ in engine.generate(Generate(conversation.ids, 1, greedy, session=session.name)):
                pass
            yield session

    def close(self) -> None:
        self._log.close()

    def _digest(self, model: ChatModel) -> str:
        known = self._digests.get(id(model))
        if known is None:
            known = self._digests[id(model)] = vault_digest(model.manifest)
        return known
