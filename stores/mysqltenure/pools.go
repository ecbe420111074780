package mysqltenure

import (
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"maps"
	"time"

	"github.com/go-sql-driver/mysql"

	"github.com/tenurelib/tenure"
)

// pools are a store's connections: those of its calls, so that renewals don't wait behind a program's queries,
// those of its bells, and those of the program. If the database is the caller's, all three are.
type pools struct {
	calls, bells, app *sql.DB

	address string // of the server; empty: unknown
	owned   bool
}

const (
	mostCalls = 4               // connections at once
	oldest    = 5 * time.Minute // of a connection that may lead to a server which was replaced, and only reads
)

// openPools makes pools that connect when they are used. They end a call of the store, though not of the program,
// whose answer does not arrive.
func openPools(config *mysql.Config, is server) (p pools, err error) {
	config = config.Clone()
	config.MaxAllowedPacket = is.packet() // the server would break the connection
	params := is.settings()
	maps.Copy(params, config.Params) // which take precedence
	config.Params = params
	app, err1 := mysql.NewConnector(config)
	quick := config.Clone()
	quick.Params = maps.Clone(params)              // Clone copies none that is empty
	quick.Params["innodb_lock_wait_timeout"] = "5" // seconds
	quick.ReadTimeout, quick.WriteTimeout = requestTimeout, requestTimeout
	calls, err2 := mysql.NewConnector(quick)
	if err := errors.Join(err1, err2); err != nil {
		return p, fmt.Errorf("%w: the driver refuses the settings (%w)", tenure.ErrInvalid, err)
	}
	p = pools{calls: sql.OpenDB(calls), bells: sql.OpenDB(calls), app: sql.OpenDB(app), address: config.Addr, owned: true}
	p.calls.SetMaxOpenConns(mostCalls)
	p.calls.SetMaxIdleConns(mostCalls)
	p.calls.SetConnMaxLifetime(oldest)
	p.bells.SetMaxIdleConns(0)
	return p, nil
}

// bellsFit reports whether connections for the bells can be spared.
func (p pools) bellsFit() bool {
	most := p.bells.Stats().MaxOpenConnections
	return most == 0 || most >= 2*(mostBells+1)
}

// close closes what the caller has not opened. An error would be of a connection that is broken already.
func (p pools) close() {
	if p.owned {
		_, _, _ = p.calls.Close(), p.bells.Close(), p.app.Close()
	}
}

// discard closes a connection, and with it all that the server keeps for it.
func discard(conn *sql.Conn) {
	_ = conn.Raw(func(any) error { return driver.ErrBadConn })
	_ = conn.Close()
}
