module github.com/weft-project/weft

go 1.24
