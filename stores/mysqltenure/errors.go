package mysqltenure

import (
	"context"
	"database/sql/driver"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/go-sql-driver/mysql"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/storekit"
)

// The server's errors, by their numbers.
const (
	errAccessDatabase = 1044
	errAccess         = 1045
	errNoDatabase     = 1049
	errNoColumn       = 1054
	errDuplicate      = 1062
	errTableAccess    = 1142
	errColumnAccess   = 1143
	errNoTable        = 1146
	errDeadlock       = 1213
	errChanged        = 1020 // a row has been changed since the transaction's snapshot
	errOutOfRange     = 1690
	errNoPassword     = 1698
	errCertification  = 3101 // group replication has rolled the transaction back
)

// number returns the number of a server's error, or 0.
func number(err error) uint16 {
	if is := (*mysql.MySQLError)(nil); errors.As(err, &is) {
		return is.Number
	}
	return 0
}

// errOvertaken says that a write found another state of its object than the one that it was made for.
// Nothing was written.
var errOvertaken = errors.New("another write came first")

// explained says what to do about an error of the server.
func explained(err error) error {
	switch number(err) {
	case 0:
		if err != nil && strings.Contains(err.Error(), "sql: database is closed") { // database/sql does not export it
			return fmt.Errorf("%w: %w", tenure.ErrClosed, err)
		}
		if errors.Is(err, driver.ErrBadConn) { // the driver hides why
			return fmt.Errorf("the server is read-only, or closes its connections: %w", err)
		}
	case errNoTable:
		return storekit.NotMigrated(err)
	case errNoColumn:
		return fmt.Errorf("%w: the table is not one that Migrate has created: choose another Table (%w)", tenure.ErrSetup, err)
	case errOutOfRange:
		if strings.Contains(err.Error(), cluster) {
			return fmt.Errorf("%w: several servers accept writes now: open the store again (%w)", tenure.ErrSetup, err)
		}
	case errAccess, errAccessDatabase, errNoDatabase, errNoPassword:
		return fmt.Errorf("%w: the server refuses the user or the database (%w)", tenure.ErrSetup, err)
	case errTableAccess, errColumnAccess:
		return fmt.Errorf("%w: the user needs GRANT SELECT, INSERT, UPDATE ON the table, and CREATE to migrate (%w)", tenure.ErrSetup, err)
	}
	return err
}

// isRolledBack reports whether the server has rolled back the whole transaction, which may succeed when it
// is sent again. A lock that was not obtained in time is none of these: the statement alone was rolled back,
// and the next one would wait as long.
func isRolledBack(err error) bool {
	return slices.Contains([]uint16{errDeadlock, errChanged, errCertification}, number(err))
}

// isFenceFailure reports whether a fence has failed because the record does not stand. Of our
// statements only that one can exceed a number's range, whatever the server's text.
func isFenceFailure(err error) bool {
	return number(err) == errOutOfRange && !strings.Contains(err.Error(), cluster)
}

const (
	mostTries    = 8
	longestPause = 8 * time.Millisecond
)

// again calls do, and once more if the server has rolled back what it did, so that nothing was written.
func again(ctx context.Context, do func() error) error {
	for try := 1; ; try++ {
		err := do()
		if !isRolledBack(err) || try == mostTries {
			return explained(err)
		}
		if ended := storekit.Pause(ctx, longestPause); ended != nil {
			return fmt.Errorf("%w: %w", ended, err)
		}
	}
}
