package mysqltenure

import (
	"cmp"
	"fmt"
	"log/slog"
	"strings"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/storekit"
)

// Config configures a [Store]. The zero value is ready to use.
type Config struct {
	// Table is the name of the table, with that of its database before a dot if it is in another
	// one than the connections use. Default "tenure_objects".
	Table string

	Logger *slog.Logger // default slog.Default()
}

const (
	defaultTable      = "tenure_objects"
	longestIdentifier = 64 // in characters
)

// withDefaults returns the config with its defaults, or [tenure.ErrInvalid].
func (cfg Config) withDefaults() (Config, error) {
	cfg.Table = cmp.Or(cfg.Table, defaultTable)
	cfg.Logger = storekit.Logger(cfg.Logger)
	parts := strings.Split(cfg.Table, ".")
	for _, part := range parts {
		if len(parts) > 2 || part == "" || len([]rune(part)) > longestIdentifier || strings.ContainsRune(part, 0) || strings.TrimRight(part, " ") != part {
			return cfg, fmt.Errorf("%w: Table %q is neither a table's name nor those of a database and a table with a dot between them", tenure.ErrInvalid, cfg.Table)
		}
	}
	return cfg, nil
}

// quoted returns a name for statements.
func quoted(name string) string { return "`" + strings.ReplaceAll(name, "`", "``") + "`" }
