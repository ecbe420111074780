package glebarez

import (
	"testing"

	_ "github.com/glebarez/go-sqlite"

	"github.com/tenurelib/tenure/proof/chaos/drivers/sqlitedriver"
)

// DSN is how the documentation says to open a file with this driver.
const DSN = "file:data.db?_txlock=immediate&_pragma=busy_timeout(25)&_pragma=journal_mode(WAL)&_pragma=synchronous(FULL)"

func TestASQLiteStoreWorksWithTheDriverOfGlebarez(t *testing.T) { sqlitedriver.Run(t, "sqlite", DSN) }
