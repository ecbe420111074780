package mattn

import (
	"testing"

	_ "github.com/mattn/go-sqlite3"

	"github.com/tenurelib/tenure/proof/chaos/drivers/sqlitedriver"
)

// DSN is how the documentation says to open a file with this driver.
const DSN = "file:data.db?_txlock=immediate&_busy_timeout=25&_journal_mode=WAL&_synchronous=FULL"

func TestASQLiteStoreWorksWithTheDriverOfMattn(t *testing.T) { sqlitedriver.Run(t, "sqlite3", DSN) }
